"""Dropping tokens between layers against a slow decoder that keeps all, masks what was dropped, and sees whole attention matrices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.decoder.spans import Span, arranged
from mmsdk.decoder.thinning import Cut, chosen, thin
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.dense import DenseCache
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.deft import DeFT
from mmsdk.tokencomp.methods.fastv import FastV
from mmsdk.tokencomp.methods.pyramiddrop import PyramidDrop
from mmsdk.tokencomp.ranking import top
from mmsdk.tokencomp.types import Thinner

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=6, heads=4, kv_heads=2, head_dim=6, inner=40, context=256, qk_norm=True)
METHODS: list[Thinner] = [
    FastV(),
    FastV(layer=1, positions="compact"),
    PyramidDrop(),
    PyramidDrop(stages=3, positions="keep"),
    DeFT(),
    DeFT(at=0.9, positions="compact"),
]
# (media, tokens): words alone; a picture; two with words between; a long one and a single last word; one in front
PROMPTS = [
    [(-1, 5)],
    [(-1, 1), (0, 9), (-1, 4)],
    [(-1, 1), (0, 7), (-1, 2), (1, 12), (-1, 3)],
    [(-1, 2), (0, 20), (-1, 1)],
    [(0, 2), (-1, 6)],
]
SHARE = 0.3


def model_of(config: DecoderConfig = CONFIG) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}).requires_grad_(False)


def words(count: int, seed: int) -> Tensor:
    return torch.randn(count, CONFIG.width, generator=torch.Generator().manual_seed(seed))


def spans_of(prompt: Sequence[tuple[int, int]], method: Thinner) -> tuple[Span, ...]:
    cuts = len(method.layers(CONFIG.layers))
    return tuple(Span(media, (n, *(method.counts(n, Budget.of(SHARE, n)) if media >= 0 else (n,) * cuts))) for media, n in prompt)


@dataclass
class Slow:
    """One row: every token in every layer, with who is alive and where it stands told layer by layer."""

    model: Decoder
    x: Tensor = field(default_factory=lambda: torch.empty(0, CONFIG.width))
    alive: list[list[bool]] = field(default_factory=lambda: [[] for _ in range(CONFIG.layers)])
    place: list[list[int]] = field(default_factory=lambda: [[] for _ in range(CONFIG.layers)])

    def turn(self, layer: int) -> Tensor:
        """cos and sin of every token in a layer [2 s f]."""
        frequencies = [CONFIG.rope_theta ** (-2 * i / CONFIG.head_dim) for i in range(CONFIG.head_dim // 2)]
        angles = torch.tensor([[place * f for f in frequencies] for place in self.place[layer]])
        return torch.stack((angles.cos(), angles.sin()))

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        """Final hidden states [s d] and every layer's attention weights [h s s]."""
        x, weights = self.x, []
        s, h, g, e = len(self.x), CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim
        for number, layer in enumerate(self.model.layers):
            heads = (norm(x, layer.norm1.weight) @ layer.attention.qkv.weight.T).view(s, h + 2 * g, e)
            query = spin(norm(heads[:, :h], layer.attention.q_norm.weight), self.turn(number))
            key = spin(norm(heads[:, h : h + g], layer.attention.k_norm.weight), self.turn(number)).repeat_interleave(h // g, dim=1)
            value = heads[:, h + g :].repeat_interleave(h // g, dim=1)
            seen = torch.ones(s, s, dtype=torch.bool).tril() & torch.tensor(self.alive[number])[None]
            # a dropped token looks at itself alone: what becomes of it is nobody's business
            seen |= torch.eye(s, dtype=torch.bool) & ~torch.tensor(self.alive[number])[:, None]
            scores = torch.einsum("ihe,jhe->hij", query, key) / math.sqrt(e)
            weights.append(scores.masked_fill(~seen, -torch.inf).softmax(dim=-1))
            x = x + torch.einsum("hij,jhe->ihe", weights[-1], value).reshape(s, h * e) @ layer.attention.o.weight.T
            gate, up = (norm(x, layer.norm2.weight) @ layer.mlp.gate_up.weight.T).chunk(2, dim=-1)
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ layer.mlp.down.weight.T
        return norm(x, self.model.norm.weight), weights

    def say(self, x: Tensor) -> Tensor:
        """More tokens; their hidden states."""
        self.x = torch.cat((self.x, x))
        for alive, place in zip(self.alive, self.place, strict=True):
            start = max((p for p, a in zip(place, alive, strict=True) if a), default=-1) + 1
            place += range(start, start + len(x))
            alive += [True] * len(x)
        return self.forward()[0][-len(x) :]

    def read(self, x: Tensor, spans: Sequence[Span], method: Thinner, rows: str, layer: str) -> Tensor:
        """A prompt with its cuts; the hidden states of what is left at its end."""
        before = len(self.x)
        self.say(x)
        owner = [span.media for span in spans for _ in range(span.counts[0])]
        for stage, cut in enumerate(method.layers(CONFIG.layers), start=1):
            asking = [before + i for i, media in enumerate(owner) if media < 0]
            weights = self.forward()[1][cut - 1 if layer == "done" else cut]
            scores = weights[:, asking if rows == "text" else asking[-1:]].mean(dim=(0, 1)).tolist()
            for span in spans:
                mine = [before + i for i, media in enumerate(owner) if media == span.media and self.alive[cut][before + i]]
                best = sorted(mine, key=lambda i: -scores[i])[: span.counts[stage]] if span.media >= 0 else mine
                for later in range(cut, CONFIG.layers):
                    for i in set(mine) - set(best):
                        self.alive[later][i] = False
            if method.positions == "compact":
                for later in range(cut, CONFIG.layers):
                    start = min(self.place[later][before:])
                    for i in range(before, len(self.x)):
                        self.place[later][i] = start + sum(self.alive[later][before:i])
        left = [i for i in range(before, len(self.x)) if self.alive[-1][i]]
        return self.forward()[0][left]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + CONFIG.norm_eps) * weight


def spin(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = turn[0][:, None], turn[1][:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)


def asks(method: Thinner) -> tuple[str, str]:
    """The published rule of each method: whose attention, in which layer."""
    return {FastV: ("last", "done"), PyramidDrop: ("last", "next"), DeFT: ("text", "done")}[type(method)]


def laid(prompt: Sequence[tuple[int, int]], method: Thinner, seed: int) -> Laid:
    n = sum(count for _, count in prompt)
    return Laid(words(n, seed), torch.arange(n), spans_of(prompt, method))


def cuts_of(method: Thinner) -> list[Cut]:
    return [Cut(layer, method) for layer in method.layers(CONFIG.layers)]


def padded(rows: Sequence[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    x, positions = torch.zeros(len(rows), width, CONFIG.width), torch.full((len(rows), width), -1)
    for i, row in enumerate(rows):
        x[i, width - len(row) :] = row
        positions[i, width - len(row) :] = start[i] + torch.arange(len(row))
    return x, positions


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_prefill_and_decoding_equal_a_reference_that_masks(method: Thinner) -> None:
    """PP-01, PP-04, PP-05: rows of words, of one and of two inputs; then tokens by one and by three; a second turn; rows chosen."""
    model = model_of()
    rows = [laid(prompt, method, seed) for seed, prompt in enumerate(PROMPTS)]
    run, cache = prefilled(model, rows, cuts_of(method), room=4)
    slow = [Slow(model) for _ in rows]
    for i, row in enumerate(rows):
        expected = slow[i].read(row.embeddings, row.spans, method, *asks(method))
        real = run.origin[i] >= 0
        padding = run.scores.shape[1] - len(row.embeddings)
        assert (run.origin[i][real] - padding).tolist() == [j for j, alive in enumerate(slow[i].alive[-1]) if alive]
        torch.testing.assert_close(run.hidden[i][real], expected, rtol=1e-4, atol=1e-4)
        for layer in range(CONFIG.layers):
            assert int(cache.view(layer).lengths[i]) == sum(slow[i].alive[layer])
    assert cache.position.tolist() == [len(row.embeddings) for row in rows]
    for step, size in enumerate((1, 1, 3)):
        said = torch.stack([words(size, 100 * step + i) for i in range(len(rows))])
        ours = model(said, cache.position[:, None] + torch.arange(size), cache)
        for i, one in enumerate(slow):
            torch.testing.assert_close(ours[i], one.say(said[i]), rtol=1e-4, atol=1e-4)
    again(model, method, cache, slow)
    picked = [3, 1, 3]
    few = cache.select(torch.tensor(picked))
    said = words(1, 999)[None].expand(3, -1, -1)
    ours = model(said, few.position[:, None], few)
    for place, row in enumerate(picked[:2]):
        torch.testing.assert_close(ours[place], slow[row].say(said[place]), rtol=1e-4, atol=1e-4)


def again(model: Decoder, method: Thinner, cache: DenseCache, slow: Sequence[Slow]) -> None:
    """Another turn on the same cache, the pictures in other rows."""
    rows = [laid(prompt, method, 50 + seed) for seed, prompt in enumerate(PROMPTS[::-1])]
    x, positions = padded([row.embeddings for row in rows], cache.position)
    run = thin(model, x, positions, cache, [row.spans for row in rows], cuts_of(method))
    for i, row in enumerate(rows):
        expected = slow[i].read(row.embeddings, row.spans, method, *asks(method))
        torch.testing.assert_close(run.hidden[i][run.origin[i] >= 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["plain", "flash"])
@pytest.mark.parametrize("method", METHODS[::2], ids=repr)
def test_no_matter_which_kernel_attends_the_same_tokens_stay(method: Thinner, backend: SDPBackend) -> None:
    """PP-01: scores are computed by themselves, to the reference's; the layers attend by what is there, and nothing falls back silently."""
    model = model_of()
    rows = [laid(prompt, method, seed) for seed, prompt in enumerate(PROMPTS)]
    with sdpa_kernel(backend):
        run, cache = prefilled(model, rows, cuts_of(method), room=2)
        said = model(words(1, 9)[None].expand(len(rows), -1, -1), cache.position[:, None], cache)
    for i, row in enumerate(rows):
        slow = Slow(model)
        expected = slow.read(row.embeddings, row.spans, method, *asks(method))
        torch.testing.assert_close(run.hidden[i][run.origin[i] >= 0], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(said[i], slow.say(words(1, 9)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 25])
@pytest.mark.parametrize("method", METHODS[::2], ids=repr)
def test_prefill_in_chunks_is_the_same(method: Thinner, chunk: int) -> None:
    model = model_of()
    rows = [laid(prompt, method, seed) for seed, prompt in enumerate(PROMPTS)]
    whole, cache = prefilled(model, rows, cuts_of(method), room=2)
    x, positions = padded([row.embeddings for row in rows], torch.zeros(len(rows), dtype=torch.long))
    pieces = DenseCache.allocate(CONFIG.layers, len(rows), CONFIG.kv_heads, CONFIG.head_dim, 2, torch.float32, "cpu")
    run = thin(model, x, positions, pieces, [row.spans for row in rows], cuts_of(method), chunk)
    assert torch.equal(run.origin, whole.origin)
    torch.testing.assert_close(run.hidden[:, -1], whole.hidden[:, -1], rtol=1e-4, atol=1e-4)
    said = words(1, 9)[None].expand(len(rows), -1, -1)
    torch.testing.assert_close(
        model(said, pieces.position[:, None], pieces), model(said, cache.position[:, None], cache), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("last", [1, 6])
@pytest.mark.parametrize("method", [FastV(), PyramidDrop(stages=3, positions="keep")], ids=repr)
def test_the_last_ones_alone_are_what_they_are_among_all(method: Thinner, last: int, chunk: int) -> None:
    model, found = model_of(), []
    rows = [laid(prompt, method, seed) for seed, prompt in enumerate(PROMPTS)]
    x, positions = padded([row.embeddings for row in rows], torch.zeros(len(rows), dtype=torch.long))
    said = words(1, 9)[None].expand(len(rows), -1, -1)
    for few, size in ((0, 1000), (last, chunk)):
        cache = DenseCache.allocate(CONFIG.layers, len(rows), CONFIG.kv_heads, CONFIG.head_dim, 2, torch.float32, "cpu")
        run = thin(model, x, positions, cache, [row.spans for row in rows], cuts_of(method), size, last=few)
        found.append((run, model(said, cache.position[:, None], cache)))
    (whole, after), (few, also) = found
    assert torch.equal(few.origin, whole.origin) and few.hidden.shape[1] == last
    seen = whole.origin[:, -last:] >= 0
    torch.testing.assert_close(few.hidden[seen], whole.hidden[:, -last:][seen], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(also, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_batch_equals_rows_alone(method: Thinner) -> None:
    model = model_of()
    rows = [laid(prompt, method, seed) for seed, prompt in enumerate(PROMPTS)]
    together, _ = prefilled(model, rows, cuts_of(method), room=1)
    for i, row in enumerate(rows):
        alone, _ = prefilled(model, [row], cuts_of(method), room=1)
        left = alone.origin.shape[1]
        padding = together.scores.shape[1] - alone.scores.shape[1]
        assert torch.equal(together.origin[i, -left:] - padding, alone.origin[0])
        torch.testing.assert_close(together.hidden[i, -1], alone.hidden[0, -1], rtol=1e-4, atol=1e-4)


def test_layers_caches_and_passes_are_really_shorter() -> None:
    """PP-04, PP-09: what a layer is given, what it caches and the bytes of it, against the same prompt in full."""
    model, method = model_of(), FastV()
    prompt = laid([(-1, 2), (0, 100), (-1, 3)], method, 0)
    given: list[int] = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].shape[1])) for layer in model.layers]
    run, cache = prefilled(model, [prompt], cuts_of(method), room=10)
    for hook in hooks:
        hook.remove()
    assert given == [105, 105, 35, 35, 35, 35] and run.hidden.shape[1] == 35
    assert [cache.view(layer).keys.shape[2] for layer in range(6)] == given
    _, full = prefilled(model, [Laid(prompt.embeddings, prompt.positions, (Span(-1, (105,)),))], [], room=10)
    entry = 2 * CONFIG.kv_heads * CONFIG.head_dim * 4
    assert full.nbytes == entry * 6 * 115 and cache.nbytes == entry * (2 * 115 + 4 * 45)
    for _ in range(10):
        model(words(1, 0)[None], cache.position[:, None], cache)
    assert cache.nbytes == entry * (2 * 115 + 4 * 45)


def test_pp_05_lengths_of_600_600_120_120() -> None:
    """PP-05, PP-07: the position is of tokens seen; under compact it is so in the first layers, and the largest plus one in later ones."""
    config = DecoderConfig(vocabulary=9, width=24, layers=4, heads=2, kv_heads=1, head_dim=8, inner=16, context=900)
    for positions, later in (("keep", [600, 90]), ("compact", [120, 90])):
        method = FastV(positions=positions)  # type: ignore[arg-type]  # the two choices
        pictures = [(Span(0, (590, 110)), Span(-1, (10, 10))), (Span(-1, (90, 90)),)]
        rows = [Laid(words(600, 0), torch.arange(600), pictures[0]), Laid(words(90, 1), torch.arange(90), pictures[1])]
        _, cache = prefilled(model_of(config), rows, [Cut(2, method)], room=1)
        assert [cache.view(layer).lengths.tolist() for layer in range(4)] == [[600, 90]] * 2 + [[120, 90]] * 2
        assert cache.position.tolist() == [600, 90] and cache.next(3).tolist() == later
        before = cache.view(3).positions[0, -120:].tolist()
        assert before == sorted(before) and (positions == "keep" or before == list(range(120)))


def test_whole_budgets_change_nothing() -> None:
    """PP-09: keeping all equals the baseline bit for bit, and no score is asked for."""
    model = model_of()
    spans = (Span(-1, (3, 3)), Span(0, (8, 8)), Span(-1, (2, 2)))
    row = Laid(words(13, 0), torch.arange(13), spans)
    run, cache = prefilled(model, [row], [Cut(3, FastV())], room=1)
    plain = DenseCache.allocate(CONFIG.layers, 1, CONFIG.kv_heads, CONFIG.head_dim, 14, torch.float32, "cpu")
    expected = model(row.embeddings[None], torch.arange(13)[None], plain)
    assert torch.equal(run.hidden, expected) and torch.equal(run.origin, torch.arange(13)[None]) and not run.scores.any()
    assert cache.nbytes == plain.nbytes


def test_pp_12_equal_scores_keep_the_earlier_tokens_of_each_input() -> None:
    rows = [(Span(-1, (1, 1)), Span(0, (4, 2)), Span(1, (3, 1)), Span(-1, (1, 1))), (Span(0, (3, 3)), Span(-1, (2, 2)))]
    now, later = arranged(rows, 0, torch.device("cpu")), arranged(rows, 1, torch.device("cpu"))
    noise = 1e-8 * torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    scores = torch.tensor([[0.0, 1, 1, 1, 1, 2, 2, 2, 0], [0.0, 0, 0, 0, 5, 5, 5, 0, 0]])
    assert chosen(scores + noise, now, later).tolist() == [[0, 1, 2, 5, 8], [4, 5, 6, 7, 8]]
    best = torch.tensor([[0.0, 1, 3, 1, 2, 1, 2, 9, 0], [0.0] * 9])
    assert chosen(best, now, later).tolist() == [[0, 2, 4, 7, 8], [4, 5, 6, 7, 8]]


def test_pp_12_at_a_cut_as_in_front_of_the_decoder_what_is_equal_to_the_last_one_chosen_decides() -> None:
    """PP-12: each is within a millionth of the next, so that two of the three stay and the last has its equals on both sides."""
    rows = [(Span(0, (3, 2)), Span(-1, (1, 1)))]
    now, later = arranged(rows, 0, torch.device("cpu")), arranged(rows, 1, torch.device("cpu"))
    scores = torch.tensor([[1 - 1.6e-6, 1 - 0.8e-6, 1.0, 0.0]])
    assert chosen(scores, now, later).tolist() == [[*top(scores[0, :3], 2).tolist(), 3]] == [[0, 1, 3]]
