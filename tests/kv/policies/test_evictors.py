"""The scores of evictors against their published formulas, written out in float64 over whole matrices, and what attends to what stays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.rope import Dynamic, Rotation, Sections, Unscaled, Yarn
from mmsdk.decoder.sight import Local
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import BudgetError, ModelError
from mmsdk.kv import slots
from mmsdk.kv.entries import Entries
from mmsdk.kv.memory import memory_of
from mmsdk.kv.none import NoCache
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import PolicyMemory
from mmsdk.kv.shelf import Shelf

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=2, heads=6, kv_heads=2, head_dim=8, inner=40, context=512, qk_norm=True)
GROUP, D = 3, 8
PROMPT, STEPS = 30, 6


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(s, generator=generator) * 0.5 + ("norm" in name) for name, s in shapes.items()})


@pytest.fixture(scope="module")
def model() -> Decoder:
    return decoder()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randn(2, PROMPT + STEPS, CONFIG.width, generator=torch.Generator().manual_seed(1))


def cache_of(kv: str, model: Decoder, rows: int = 1) -> PolicyCache:
    memory = memory_of(kv)
    assert isinstance(memory, PolicyMemory)
    return memory.cache(model.config.layers, rows, "cpu")


def held(cache: PolicyCache, layer: int, row: int = 0) -> list[set[int]]:
    """The positions that each key-value head holds of a row."""
    store = cache.store(layer)
    assert isinstance(store, Shelf)
    positions = store.entries.positions.expand(-1, CONFIG.kv_heads, -1)[row]
    return [set(head[head >= 0].tolist()) for head in positions]


@torch.no_grad()
def first_layer(model: Decoder, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries before and after their rotation, keys and values of the first layer, [heads, tokens, width], in float64."""
    layer, count = model.layers[0], len(x)
    still = Rotation(torch.ones(1, 1, 1, D // 2), torch.zeros(1, 1, 1, D // 2))
    turned = model.rotation(torch.arange(count)[None], torch.float32)
    before, _, _ = layer.attention.project(layer.norm1(x[None]), still)
    query, key, value = layer.attention.project(layer.norm1(x[None]), turned)
    return before[0].double(), query[0].double(), key[0].double(), value[0].double()


def attention(query: Tensor, key: Tensor, last: int) -> Tensor:
    """The weights of the last queries over all keys, causal, [heads, last, tokens]."""
    key = key.repeat_interleave(GROUP, dim=0)
    scores = query[:, -last:] @ key.transpose(1, 2) / math.sqrt(D)
    return (scores + torch.full_like(scores, -math.inf).triu(key.shape[1] - last + 1)).softmax(-1)


def snapkv(model: Decoder, x: Tensor, window: int = 8, kernel: int = 5) -> Tensor:
    """kvpress 0.3, SnapKVPress.score."""
    _, query, key, _ = first_layer(model, x)
    scores = attention(query, key, window)[..., :-window].mean(1)
    scores = F.avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0].view(2, GROUP, -1).mean(1)
    return F.pad(scores, (0, window), value=float(scores.max()) + 1)


def tova(model: Decoder, x: Tensor) -> Tensor:
    """kvpress, TOVAPress.score."""
    _, query, key, _ = first_layer(model, x)
    scores = attention(query, key, 1)[:, 0].mean(0).repeat(2, 1)
    scores[:, -1] = scores.max() + 1
    return scores


def h2o(model: Decoder, x: Tensor) -> Tensor:
    """Heavy hitters of 12: the last 6, and of the others by accumulated attention."""
    _, query, key, _ = first_layer(model, x)
    scores = attention(query, key, len(x)).sum(1).view(2, GROUP, -1).mean(1)
    scores[:, -6:] = scores.max() + 1
    return scores


def keydiff(model: Decoder, x: Tensor) -> Tensor:
    """kvpress, KeyDiffPress.score; the newest stays."""
    _, _, key, _ = first_layer(model, x)
    anchor = F.normalize(key, dim=-1).mean(1, keepdim=True)
    scores = -F.cosine_similarity(key, anchor, dim=-1)
    scores[:, -1] = 2
    return scores


def expected(model: Decoder, x: Tensor, future: int = 64, sinks: int = 4) -> Tensor:
    """kvpress, ExpectedAttentionPress.score: the mean rotation as a matrix; the newest stays."""
    before, _, key, value = first_layer(model, x)
    before, key, value = before[:, sinks:], key[:, sinks:].repeat_interleave(GROUP, dim=0), value[:, sinks:]
    mean = before.mean(1)
    centred = before - mean[:, None]
    spread = torch.einsum("hsi,hsj->hij", centred, centred) / before.shape[1]
    rotation = model.rotation(torch.arange(len(x), len(x) + future)[None], torch.float64)
    cos, sin = (torch.cat((part[0, 0], part[0, 0]), dim=-1) for part in (rotation.cos, rotation.sin))
    swap = torch.zeros(D, D, dtype=torch.float64)
    swap[D // 2 :, : D // 2], swap[: D // 2, D // 2 :] = torch.eye(D // 2), -torch.eye(D // 2)
    turn = (cos[:, None] * torch.eye(D) + sin[:, :, None] * swap).mean(0)
    mean, spread = mean @ turn.T, turn @ spread @ turn.T
    logits = torch.einsum("hd,hnd->hn", mean, key) / math.sqrt(D) + torch.einsum("hni,hij,hnj->hn", key, spread, key) / D / 2
    scores = logits.softmax(-1).view(2, GROUP, -1).mean(1) * value.norm(dim=-1)
    scores = F.pad(scores, (sinks, 0), value=float(scores.max()) + 1)
    scores[:, -1] = scores.max()
    return scores


FORMULAS: dict[str, Callable[[Decoder, Tensor], Tensor]] = {
    "snapkv:12,window=8": snapkv, "tova:12": tova, "h2o:12": h2o, "keydiff:12": keydiff, "expected:12,future=64": expected,
}  # fmt: skip


@pytest.mark.parametrize("kv", FORMULAS)
def test_what_stays_of_a_prompt_is_what_the_formula_ranks_first(model: Decoder, tokens: Tensor, kv: str) -> None:
    """In two rows, of which one is padded in front; head by head."""
    blank = 5
    at = torch.arange(PROMPT).expand(2, -1).clone()
    at[1] = (at[1] - blank).clamp_min(-1)
    cache = cache_of(kv, model, 2)
    with torch.no_grad():
        model(tokens[:, :PROMPT], at, cache)
    cache.settle()
    for row, first in ((0, 0), (1, blank)):
        scores = FORMULAS[kv](model, tokens[row, first:PROMPT])
        assert held(cache, 0, row) == [set(head.topk(12).indices.tolist()) for head in scores]


def test_what_was_received_in_parts_is_what_was_received_at_once(model: Decoder, tokens: Tensor) -> None:
    """A prompt that comes in chunks, and forgets nothing between them."""
    for kv in ("h2o:12", "snapkv:12,window=8", "expected:12,future=64"):
        whole, parts = cache_of(kv, model), cache_of(kv, model)
        with torch.no_grad():
            model(tokens[:1, :PROMPT], torch.arange(PROMPT)[None], whole)
            for start in range(0, PROMPT, 7):
                here = slice(start, min(start + 7, PROMPT))
                model(tokens[:1, here], torch.arange(PROMPT)[None, here], parts)
        whole.settle()
        parts.settle()
        assert [held(whole, layer) for layer in range(2)] == [held(parts, layer) for layer in range(2)]


Held = Sequence[Sequence[set[int]]]


@torch.no_grad()
def written_out(model: Decoder, x: Tensor, seen: Sequence[Held], inside: bool = False) -> Tensor:
    """What follows a prompt, where token i sees seen[i][layer][head] and itself: by lists, and in float64 but for the decoder's products.

    `inside` counts positions inside the cache.
    """
    still = Rotation(torch.ones(1, 1, 1, D // 2), torch.zeros(1, 1, 1, D // 2))
    keys, values = [torch.zeros(2, 0, D)] * 2, [torch.zeros(2, 0, D)] * 2
    outs = []
    for start, stop in [(0, PROMPT), *((PROMPT + i, PROMPT + i + 1) for i in range(len(seen)))]:
        y = x[None, start:stop]
        for number, layer in enumerate(model.layers):
            query, key, value = layer.attention.project(layer.norm1(y), still)
            keys[number], values[number] = torch.cat((keys[number], key[0]), 1), torch.cat((values[number], value[0]), 1)
            out = torch.zeros(1, stop - start, 6, D)
            for head in range(6):
                for i, at in enumerate(range(start, stop)):
                    before = set(range(at)) if start == 0 else seen[start - PROMPT][number][head // GROUP]
                    there = torch.tensor(sorted(before | {at}))
                    places = torch.arange(len(there)) if inside and start else there
                    turn = model.rotation(places[None], torch.float32)
                    key = turn(keys[number][None, head // GROUP : head // GROUP + 1, there])[0, 0].double()
                    ask = model.rotation(places[None, -1:], torch.float32)(query[:, head : head + 1, i : i + 1])[0, 0, 0].double()
                    weights = (key @ ask / math.sqrt(D)).softmax(0)
                    out[0, i, head] = (weights @ values[number][head // GROUP, there].double()).float()
            y = y + layer.attention.o(out.flatten(2))
            y = y + layer.mlp(layer.norm2(y))
        outs.append(model.norm(y)[0, -1])
    return torch.stack(outs[1:])


@pytest.mark.parametrize("kv", ["snapkv:10,window=4", "h2o:10", "tova:10", "keydiff:10,interval=3", "expected:0.4,interval=2", "random:10",
                                "h2o:10,dense=1"])  # fmt: skip
def test_an_answer_sees_what_is_held_and_nothing_else(model: Decoder, tokens: Tensor, kv: str) -> None:
    cache, seen, outs = cache_of(kv, model), list[Held](), list[Tensor]()
    with torch.no_grad():
        model(tokens[:1, :PROMPT], torch.arange(PROMPT)[None], cache)
        cache.settle()
        for i in range(STEPS):
            seen.append([held(cache, layer) for layer in range(2)])
            outs.append(model(tokens[:1, PROMPT + i : PROMPT + i + 1], cache.position[:, None], cache)[0, -1])
    torch.testing.assert_close(torch.stack(outs), written_out(model, tokens[0], seen), rtol=1e-3, atol=1e-4)
    assert not all(held == seen[0] for held in seen)


def test_several_new_tokens_see_one_another_and_what_their_head_holds(model: Decoder, tokens: Tensor) -> None:
    """A second message goes in whole, behind heads that hold different tokens, and is then brought to the budget."""
    cache = cache_of("snapkv:10,window=4,interval=1", model)
    with torch.no_grad():
        model(tokens[:1, :PROMPT], torch.arange(PROMPT)[None], cache)
        cache.settle()
        before = [held(cache, layer) for layer in range(2)]
        assert before[0][0] != before[0][1]
        together = model(tokens[:1, PROMPT:], torch.arange(PROMPT, PROMPT + STEPS)[None], cache)[0]
    late = [[[head | set(range(PROMPT, PROMPT + i)) for head in layer] for layer in before] for i in range(STEPS)]
    torch.testing.assert_close(together, written_out(model, tokens[0], late), rtol=1e-3, atol=1e-4)
    assert cache.lengths(0).tolist() == [[10, 10]]


@pytest.mark.parametrize("kv", ["h2o:24", "tova:24", "snapkv:24,window=4", "keydiff:24", "random:24", "window:24", "streaming:24"])
def test_a_row_is_thinned_when_its_own_interval_is_over(model: Decoder, tokens: Tensor, kv: str) -> None:
    """A row that comes up to its budget later than its neighbour lets go later, too: all of it as alone."""
    kv = f"{kv},interval=4" if not kv.startswith("window") else kv
    blank, at = 8, torch.arange(PROMPT).expand(2, -1).clone()
    at[1] = torch.cat((torch.full((blank,), -1), torch.arange(PROMPT - blank)))
    together, counts, outs = cache_of(kv, model, rows=2), list[list[int]](), list[Tensor]()
    with torch.no_grad():
        model(tokens[:, :PROMPT], at, together)
        together.settle()
        for i in range(STEPS):
            x = tokens[:, PROMPT + i : PROMPT + i + 1]
            outs.append(model(x, together.position[:, None], together)[:, -1])
            counts.append(together.lengths(0).amax(1).tolist())
    for row in range(2):
        alone = cache_of(kv, model)
        with torch.no_grad():
            model(tokens[row : row + 1, blank * row : PROMPT], torch.arange(PROMPT - blank * row)[None], alone)
            alone.settle()
            for i in range(STEPS):
                out = model(tokens[row : row + 1, PROMPT + i : PROMPT + i + 1], alone.position[:, None], alone)[0, -1]
                torch.testing.assert_close(outs[i][row], out, rtol=1e-3, atol=1e-4)
                assert counts[i][row] == int(alone.lengths(0).max())
    assert [count[1] for count in counts] == ([23, 24, 24, 24, 24, 24] if kv == "window:24" else [23, 24, 25, 26, 27, 24])


@pytest.mark.parametrize("told", [True, False])
def test_lengths_are_counted_when_a_row_may_be_due_and_not_at_every_token(
    model: Decoder, tokens: Tensor, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows whose budgets lie further apart than the interval; and where it is not known whether new tokens are padding."""
    blank, at = 10, torch.arange(PROMPT).expand(2, -1).clone()
    at[1] = (at[1] - blank).clamp_min(-1)
    cache, counted = cache_of("h2o:0.8,interval=3", model, rows=2), list[int]()
    lengths = Entries.lengths.fget
    assert lengths is not None
    with torch.no_grad():
        model(tokens[:, :PROMPT], at, cache)
        cache.settle()
        assert cache.lengths(0).amax(1).tolist() == [24, 16]
        monkeypatch.setattr(Entries, "lengths", property(lambda self: counted.append(step) or lengths(self)))
        if not told:
            monkeypatch.setattr("mmsdk.kv.entries.ascending", lambda positions, before, asking: False)
        for step in range(STEPS):
            model(tokens[:, PROMPT + step : PROMPT + step + 1], cache.position[:, None], cache)
    assert set(counted) == {2, 5}


@pytest.mark.parametrize("kv", ["h2o:20", "tova:20", "streaming:20", "window:20"])
def test_layers_know_how_much_they_hold_without_asking_a_device(
    model: Decoder, tokens: Tensor, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where whether a single token is padding is only known to who asks: a pass does so once, and no layer by itself."""
    asked = list[bool]()

    def ascending(positions: Tensor, after: Tensor, asking: bool = False) -> bool:
        asked.append(asking)
        return asking and slots.ascending(positions, after)

    def longest(store: Shelf) -> list[int]:
        assert store._exact, "a layer asks the device"
        return store._most

    cache = cache_of(kv, model, rows=2)
    monkeypatch.setattr("mmsdk.kv.entries.ascending", ascending)
    monkeypatch.setattr(Shelf, "_longest", longest)
    with torch.no_grad():
        model(tokens[:, :PROMPT], torch.arange(PROMPT).expand(2, -1), cache)
        cache.settle()
        for step in range(STEPS):
            model(tokens[:, PROMPT + step : PROMPT + step + 1], cache.position[:, None], cache)
    assert all(cache.lengths(layer).tolist() == [[20] * len(cache.lengths(layer)[0])] * 2 for layer in range(CONFIG.layers))
    assert asked == [True] * (1 + STEPS)


YARN = Yarn(4.0, 64, amplitude=1.2)


@pytest.mark.parametrize("scaled", [False, True])
def test_streaming_counts_positions_inside_the_cache(tokens: Tensor, scaled: bool) -> None:
    """Sinks and window against keys that are turned anew, at 0, 1, 2, ..., for every token; YaRN multiplies keys only once."""
    model = decoder(replace(CONFIG, rope_scaling=YARN if scaled else Unscaled()))
    cache, seen, outs = cache_of("streaming:10,sinks=3", model), list[Held](), list[Tensor]()
    with torch.no_grad():
        model(tokens[:1, :PROMPT], torch.arange(PROMPT)[None], cache)
        cache.settle()
        for i in range(STEPS):
            # ten with the token itself
            seen.append([[{0, 1, 2} | set(range(PROMPT + i - 6, PROMPT + i))] * 2] * 2)
            assert cache.lengths(0).tolist() == [[10]]
            outs.append(model(tokens[:1, PROMPT + i : PROMPT + i + 1], cache.position[:, None], cache)[0, -1])
    torch.testing.assert_close(torch.stack(outs), written_out(model, tokens[0], seen, inside=True), rtol=1e-3, atol=1e-4)


def test_streaming_is_as_exact_after_many_tokens(model: Decoder) -> None:
    """Sinks are turned from their originals: in bfloat16 no rounding adds up, and memory stays as it is but for a few spare slots."""
    cache = cache_of("streaming:12", model)
    x = torch.randn(1, 50, CONFIG.width, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(x[:, :20], torch.arange(20)[None], cache)
        store = cache.store(0)
        assert isinstance(store, Shelf)
        original = store.entries.keys[:, :, :4].clone()
        cache.settle()
        sizes, slots = list[int](), cache.span
        for at in range(20, 50):
            model(x[:, at : at + 1], cache.position[:, None], cache)
            sizes.append(cache.nbytes)
    assert max(sizes[15:]) == max(sizes[:15]) and cache.span <= slots * 17 / 13 and cache.position.tolist() == [50]
    by = torch.full((1, 1, 4), 50 - 8 - 4)
    torch.testing.assert_close(store.entries.keys[:, :, :4], store.entries.turning.further(original, by))
    assert store.entries.positions[0, 0].tolist() == list(range(38, 50))


def test_streaming_refuses_keys_that_are_turned_by_the_length_of_their_row(tokens: Tensor) -> None:
    model = decoder(replace(CONFIG, rope_scaling=Dynamic(2.0, 16)))
    with pytest.raises(ModelError, match="choose window"), torch.no_grad():
        model(tokens[:1, :PROMPT], torch.arange(PROMPT)[None], cache_of("streaming:10", model))


def test_streaming_along_three_axes_closes_the_gap_on_all_of_them() -> None:
    """M-RoPE: a picture of 2 x 4 cells, of which part goes; the sinks follow the first token of the window on the axis of time."""
    config = replace(CONFIG, rope_sections=Sections((2, 1, 1)), layers=1)
    model = decoder(config)
    x = torch.randn(1, 16, CONFIG.width, generator=torch.Generator().manual_seed(3))
    cells = torch.stack((torch.zeros(8), torch.arange(8) // 4, torch.arange(8) % 4)).long() + 4
    turns = torch.cat((torch.arange(4).expand(3, -1), cells, torch.arange(8, 12).expand(3, -1)), dim=1)[:, None]
    cache = cache_of("streaming:6,sinks=2", model)
    with torch.no_grad():
        model.run(x, torch.arange(16)[None], cache, range(1), turns=(turns,))
        store = cache.store(0)
        assert isinstance(store, Shelf)
        original = store.entries.keys.clone()
    cache.settle()
    # what stays: two sinks at 0 and 1, and the last four, which are words at 8 to 11; sinks move to 6 and 7
    torch.testing.assert_close(store.entries.keys[:, :, :2], store.entries.turning.further(original[:, :, :2], torch.full((1, 1, 2), 6)))
    assert torch.equal(store.entries.keys[:, :, 2:], original[:, :, 12:])


def test_ka_07_a_window_of_2048_keys() -> None:
    """Of 2,047, 2,048 and more tokens it holds exactly 2,048 with the current one, and gives what a mask over all of them does."""
    config = replace(CONFIG, layers=1, context=4096)
    model, masked = decoder(config), decoder(replace(config, local=Local((0,), 2048)))
    x = torch.randn(1, 2052, CONFIG.width, generator=torch.Generator().manual_seed(5))
    cache = cache_of("window:2048", model)
    with torch.no_grad():
        uncached = masked(x, torch.arange(2052)[None], NoCache())
        first = model(x[:, :2046], torch.arange(2046)[None], cache)
        cache.settle()
        for at in range(2046, 2052):
            out = model(x[:, at : at + 1], cache.position[:, None], cache)
            assert held(cache, 0)[0] == set(range(max(0, at - 2047), at + 1))
            torch.testing.assert_close(out[:, 0], uncached[:, at], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, uncached[:, :2046], rtol=1e-4, atol=1e-5)


def test_sinks_stay() -> None:
    model = decoder()
    x = torch.randn(1, 54, CONFIG.width, generator=torch.Generator().manual_seed(4))
    for kv in ("expected:8,future=32,interval=2", "streaming:8"):
        cache = cache_of(kv, model)
        with torch.no_grad():
            model(x[:, :48], torch.arange(48)[None], cache)
            cache.settle()
            first = [cache.store(layer).view().values[:, :, :4].clone() for layer in range(2)]
            for at in range(48, 54):
                model(x[:, at : at + 1], cache.position[:, None], cache)
        assert all(torch.equal(first[layer], cache.store(layer).view().values[:, :, :4]) for layer in range(2))


def test_knobs_that_cannot_be_are_told() -> None:
    for kv in ("snapkv:8,kernel=4", "snapkv:8,window=0", "streaming:8,sinks=0", "expected:8,future=0"):
        with pytest.raises(BudgetError):
            memory_of(kv)
