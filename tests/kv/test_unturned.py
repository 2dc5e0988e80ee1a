"""Keys kept before their rotation: against lists of entries turned by hand, against transformers, and behind every kind of reader."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from mmsdk.attention.mla import Latent
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import hasten
from mmsdk.decoder.rope import Rope, Rotation, Unscaled
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kernels.cpu.library import library
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.parts import Block, Part, whole
from mmsdk.kv.read import ReadCache
from mmsdk.kv.readers import BlockQueue
from mmsdk.kv.received import received
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.kv.types import KVCache, LayerView
from mmsdk.kv.unturned import UnturnedCache
from mmsdk.models.text import read_decoder

LAYERS, HEADS, WIDTH = 2, 2, 4
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}  # fmt: skip
# the second layer of Gemma 3 sees a window of four tokens and turns by frequencies of its own; all have norms behind them
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=KINDS)),
}


def rotation(positions: Tensor, dtype: torch.dtype, layer: int = -1) -> Rotation:
    """Layer 1 is one with a rotation of its own."""
    return Rope(WIDTH, 100.0 if layer == 1 else 10_000.0, Unscaled())(positions, dtype)


def turned(x: Tensor, position: int, layer: int) -> Tensor:
    """Vectors [heads width] at a position, in pairs of channels, by complex numbers."""
    theta, half = (100.0 if layer == 1 else 10_000.0), x.shape[1] // 2
    angles = torch.tensor([position / theta ** (i / half) for i in range(half)], dtype=torch.float64)
    pairs = torch.complex(x[:, :half].double(), x[:, half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=1).float()


@dataclass
class Listed:
    """The same cache as lists: of every layer and row the (real, key, value) of its entries, keys as they came."""

    cache: UnturnedCache
    entries: list[list[list[tuple[bool, Tensor, Tensor]]]] = field(default_factory=list)

    @staticmethod
    def of(rows: int) -> "Listed":
        return Listed(UnturnedCache.empty(LAYERS, rows, "cpu", rotation, {1}), [[[] for _ in range(rows)] for _ in range(LAYERS)])

    def append(self, real: list[list[bool]], seed: int) -> None:
        generator, rows, count = torch.Generator().manual_seed(seed), len(real), len(real[0])
        for layer in range(LAYERS):
            keys, values = torch.randn(2, rows, HEADS, count, WIDTH, generator=generator)
            places = torch.tensor(real).long().cumsum(1) - 1 + self.cache.next(layer)[:, None]
            self.cache.advance(places.masked_fill(~torch.tensor(real), -1), range(layer, layer + 1))
            self.cache.append(layer, keys, values)
            for row in range(rows):
                self.entries[layer][row] += zip(real[row], keys[row].unbind(1), values[row].unbind(1), strict=True)

    def keep(self, layer: int, index: Tensor) -> None:
        self.cache.keep(layer, index)
        self.entries[layer] = [[row[i] for i in chosen] for row, chosen in zip(self.entries[layer], index.tolist(), strict=True)]

    def fork(self) -> "Listed":
        return Listed(self.cache.fork(), [[list(row) for row in layer] for layer in self.entries])

    def select(self, rows: list[int]) -> "Listed":
        return Listed(self.cache.select(torch.tensor(rows)), [[list(layer[row]) for row in rows] for layer in self.entries])

    def check(self) -> None:
        for layer, rows in enumerate(self.entries):
            if not rows[0]:
                continue
            view = self.cache.view(layer)
            assert self.cache.next(layer).tolist() == view.lengths.tolist() == [sum(real for real, _, _ in row) for row in rows]
            assert not view.ordered or bool(view.valid.all())
            for row, items in enumerate(rows):
                position = 0
                for column, (real, key, value) in enumerate(items):
                    assert bool(view.valid[row, column]) == real
                    assert int(view.positions[row, column]) == (position if real else -1)
                    if real:
                        torch.testing.assert_close(view.keys[row, :, column], turned(key, position, layer), atol=1e-5, rtol=1e-5)
                        assert torch.equal(view.values[row, :, column], value)
                    position += real


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_sequence_of_operations_reads_entries_at_positions_without_gaps(data: st.DataObject) -> None:
    """Appending, thinning single layers, forks and rows: what is held stands at 0, 1, 2, ..., whatever went before and beside it."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    caches = [Listed.of(number(1, 3))]
    for step in range(number(1, 8)):
        listed = caches[number(0, len(caches) - 1)]
        rows, kind = len(listed.entries[0]), number(0, 4)
        if kind <= 1:
            count = number(1, 4)
            listed.append([[number(0, 3) > 0 for _ in range(count)] for _ in range(rows)], seed=step)
        elif kind == 2 and listed.entries[0][0]:
            layer = number(0, LAYERS - 1)
            held = len(listed.entries[layer][0])
            generator, count = torch.Generator().manual_seed(step), number(1, held)
            index = [torch.randperm(held, generator=generator)[:count].sort().values for _ in range(rows)]
            listed.keep(layer, torch.stack(index))
        elif kind == 3 and len(caches) < 4:
            caches.append(listed.fork())
        elif kind == 4 and len(caches) < 4:
            caches.append(listed.select([number(0, rows - 1) for _ in range(number(1, 3))]))
        for one in caches:
            one.check()


@pytest.fixture(scope="module", params=FAMILIES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Decoder]:
    """One model twice, transformers' and ours."""
    model, generator = FAMILIES[request.param](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25 + ("norm" in name))
    folder = tmp_path_factory.mktemp(request.param)
    model.eval().save_pretrained(folder)
    return model, read_decoder(folder, torch.float32)


def empty(decoder: Decoder, rows: int) -> UnturnedCache:
    return UnturnedCache.empty(decoder.config.layers, rows, "cpu", decoder.rotation, decoder.config.local.layers)


def test_a_text_in_pieces_is_what_transformers_makes_of_it(twins: tuple[PreTrainedModel, Decoder]) -> None:
    """Two prompts of 5 and 9 tokens, padded in front, in pieces of 6, 2 and 1 and then word by word."""
    model, decoder = twins
    ids = torch.randint(3, 40, (2, 13), generator=torch.Generator().manual_seed(1))
    known = torch.arange(13) >= torch.tensor([[4], [0]])
    positions = torch.where(known, known.cumsum(1) - 1, -1)
    cache, found, start = empty(decoder, 2), [], 0
    with torch.no_grad():
        for size in (6, 2, 1, 1, 1, 1, 1):
            here = slice(start, start + size)
            found.append(decoder.logits(decoder(decoder.embed(ids[:, here]), positions[:, here], cache)))
            start += size
        for row, blank in ((0, 4), (1, 0)):
            expected = model(ids[row : row + 1, blank:]).logits[0]
            torch.testing.assert_close(torch.cat(found, dim=1)[row, blank:], expected, atol=1e-4, rtol=1e-4)
    assert isinstance(cache, KVCache) and cache.position.tolist() == [9, 13]


def test_what_is_said_behind_it_is_what_transformers_says(twins: tuple[PreTrainedModel, Decoder]) -> None:
    """Three answers go on from one prompt, and end one by one, so that rows are dropped on the way."""
    model, decoder = twins
    ids = torch.randint(3, 40, (1, 7), generator=torch.Generator().manual_seed(2))
    cache = empty(decoder, 1)
    with torch.no_grad():
        hidden = decoder(decoder.embed(ids), torch.arange(7)[None], cache)[:, -1]
        configs = [GenerationConfig(max_tokens=count) for count in (2, 5, 8)]
        rows = torch.zeros(3, dtype=torch.long)
        said = collect(generate(decoder, hidden[rows], cache.select(rows), configs, str, frozenset()), 3)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)[0, 7:].tolist()
    assert [list(one.ids) for one in said] == [expected[:2], expected[:5], expected]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    generator, config = torch.Generator().manual_seed(3), DecoderConfig(40, 24, 2, 4, 2, 8, 32, 128)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()})


@pytest.mark.skipif(library().functions is None, reason=library().state)
def test_steps_in_cpp_hand_it_keys_that_are_not_turned() -> None:
    """Two rows in bfloat16: prompts and steps in C++ over this cache are those over a dense one, to within rounding."""
    generator, config = torch.Generator().manual_seed(9), DecoderConfig(80, 96, 3, 4, 2, 32, 112, 128)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    state = {name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name) for name, shape in shapes.items()}
    model = Decoder.of(config, {name: tensor.bfloat16() for name, tensor in state.items()})
    hasten(model)
    x, found = model.embed(torch.randint(0, 80, (2, 12), generator=generator)), list[Tensor]()
    for cache in (DenseCache.allocate(3, 2, 2, 32, 12, torch.bfloat16, "cpu"), empty(model, 2)):
        with torch.no_grad():
            first = model(x[:, :9], torch.arange(9).expand(2, -1), cache)
            others = [model(x[:, at : at + 1], cache.position[:, None], cache) for at in range(9, 12)]
        found.append(torch.cat((first, *others), dim=1).float())
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0.05)


VALID = torch.tensor([[True, True, True, False, True, True], [False, True, True, True, True, True], [True] * 6])


def block(seed: int) -> Block:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 2, 3, 2, 6, 8, generator=generator)
    return Block(keys, values, VALID, float(seed))


def attended(decoder: Decoder, x: Tensor, parts: list[Part], row: int) -> Tensor:
    """One token behind parts, layer by layer and number by number: the stream after the first layer's attention."""
    layer = decoder.layers[0]
    heads = layer.attention.qkv(layer.norm1(x[row])).view(8, 8)
    entries = [(part.block, int(slot)) for part in parts for slot in part.index[row] if part.block.valid[row, slot]]
    out = torch.zeros(4, 8)
    for head in range(4):
        query = by_hand(heads[head], len(entries))
        keys = [by_hand(one.keys[0, row, head // 2, slot], at) for at, (one, slot) in enumerate(entries)]
        keys.append(by_hand(heads[4 + head // 2], len(entries)))
        values = [one.values[0, row, head // 2, slot] for one, slot in entries] + [heads[6 + head // 2]]
        out[head] = (torch.stack(keys) @ query / math.sqrt(8)).softmax(0) @ torch.stack(values)
    result: Tensor = x[row, 0] + layer.attention.o(out.flatten())
    return result


def by_hand(x: Tensor, position: int) -> Tensor:
    out = x.clone()
    for i in range(4):
        angle = position / 10_000 ** (i / 4)
        left, right = x[i], x[i + 4]
        out[i], out[i + 4] = left * math.cos(angle) - right * math.sin(angle), right * math.cos(angle) + left * math.sin(angle)
    return out


def test_two_readers_of_the_same_blocks_each_see_their_own_parts(decoder: Decoder) -> None:
    """Rows select differently, and hold different numbers of real slots; nothing is written into what they share."""
    blocks, x = [block(1), block(2)], torch.randn(3, 1, 24, generator=torch.Generator().manual_seed(4))
    before = [(one.keys.clone(), one.values.clone()) for one in blocks]
    few = torch.tensor([[0, 2, 3], [0, 1, 5], [1, 3, 4]])
    readers = {"some": [Part(blocks[0], few, complete=False), whole(blocks[1])], "last": [whole(blocks[1])]}
    for parts in readers.values():
        cache = UnturnedCache.behind(parts, decoder.rotation)
        taken: list[Tensor] = []
        handle = decoder.layers[0].norm2.register_forward_pre_hook(lambda _, inputs, taken=taken: taken.append(inputs[0]))
        with torch.no_grad():
            decoder(x, cache.position[:, None], cache)
            handle.remove()
            for row in range(3):
                torch.testing.assert_close(taken[0][row, 0], attended(decoder, x, parts, row), atol=1e-5, rtol=1e-4)
    for one, (keys, values) in zip(blocks, before, strict=True):
        assert torch.equal(one.keys, keys) and torch.equal(one.values, values)
    # whoever only reads a complete block shares its memory
    assert ReadCache.of([whole(blocks[0])], decoder.rotation).view(1).values.data_ptr() == blocks[0].values[1].data_ptr()


def test_continuations_of_one_prefix_leave_it_as_it_was(decoder: Decoder) -> None:
    """Two forks read different things behind the same parts; the source, its blocks and a view of it do not change by a bit."""
    parts, x = [whole(block(1)), whole(block(2))], torch.randn(2, 3, 2, 24, generator=torch.Generator().manual_seed(5))
    source = UnturnedCache.behind(parts, decoder.rotation)
    view, held = ReadCache.at(source, 2), [source.view(layer).keys.clone() for layer in range(2)]
    places = source.position[:, None] + torch.arange(2)
    with torch.no_grad():
        forks = [source.fork(), source.fork()]
        found = [decoder(tokens, places, fork) for tokens, fork in zip(x, forks, strict=True)]
        alone = [decoder(tokens, places, UnturnedCache.behind(parts, decoder.rotation)) for tokens in x]
        forks[0].keep(1, torch.arange(5).expand(3, -1))
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one, other)
    assert not torch.allclose(*found)
    for cache in (source, view):
        assert cache.position.tolist() == [10, 10, 12] and cache.view(0).positions.shape == (3, 12)
        assert all(torch.equal(cache.view(layer).keys, held[layer]) for layer in range(2))
    # heads that act take a fork, which for a view is the view
    assert view.fork() is view and view.next(0) is view.next(1)


def test_a_block_that_was_read_behind_others_is_read_again_elsewhere(decoder: Decoder) -> None:
    """What `block` gives is the new tokens alone, before their rotation: read where it stood it is as it was."""
    parts, x = [whole(block(1))], torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(6))
    cache = UnturnedCache.behind(parts, decoder.rotation)
    with torch.no_grad():
        decoder(x, cache.position[:, None] + torch.arange(4), cache)
    new = cache.block(4, 7.0)
    assert new.keys.shape == (2, 3, 2, 4, 8) and new.time == 7.0 and bool(new.valid.all())
    again, alone = (ReadCache.of(of, decoder.rotation) for of in ([*parts, whole(new)], [whole(new)]))
    for layer in range(2):
        assert torch.equal(again.view(layer).keys, cache.view(layer).keys)
        assert torch.equal(alone.view(layer).values, new.values[layer])
        for row in range(3):
            for slot in range(4):
                expected = torch.stack([by_hand(new.keys[layer, row, head, slot], slot) for head in range(2)])
                torch.testing.assert_close(alone.view(layer).keys[row, :, slot], expected, atol=1e-5, rtol=1e-4)
    # it holds no memory of what it stood behind
    assert new.nbytes == 2 * 2 * 3 * 2 * 4 * 8 * 4 and new.keys.untyped_storage().nbytes() == new.keys.nbytes


def test_readers_of_a_queue_learn_from_their_own_attention_alone(decoder: Decoder) -> None:
    """Any decoder with two readers: each takes half of what it looked at most, and what it takes is independent of the other."""
    layout, half, queue = BlockLayout(cameras=(4,), words=2), Selection(tokens=2, reserve=0), BlockQueue(2)
    queue.push(block(1))
    x, chosen = torch.randn(2, 3, 1, 24, generator=torch.Generator().manual_seed(7)), {}
    for name, asking in zip(("answer", "act"), x, strict=True):
        seen = list[Tensor]()

        def look(layer: int, query: Tensor, view: LayerView, seen: list[Tensor] = seen) -> None:
            seen.append(received(query, view.lengths[:, None], view)[:, :6])

        parts = queue.parts(name, Selection(ratio=1.0), layout)
        cache = UnturnedCache.behind(parts, decoder.rotation, look=look)
        with torch.no_grad():
            decoder(asking, cache.position[:, None], cache)
        queue.observe(name, parts, torch.stack(seen), keep=0.2)
        best = torch.stack(seen).amax(0).masked_fill(~VALID, -1)[:, :4].topk(2).indices.sort().values
        chosen[name] = queue.parts(name, half, layout)[0].index
        assert torch.equal(chosen[name], torch.cat((best, torch.tensor([[4, 5]]).expand(3, -1)), dim=1))
    assert not torch.equal(chosen["answer"], chosen["act"]) and set(queue.entries[0].scores) == {"answer", "act"}
    assert torch.equal(queue.parts("answer", half, layout)[0].index, chosen["answer"])


def test_gradients_reach_the_blocks_that_are_read(decoder: Decoder) -> None:
    parts, x = [whole(block(1))], torch.randn(3, 2, 24, generator=torch.Generator().manual_seed(8))
    leaf = replace(parts[0].block, keys=parts[0].block.keys.clone().requires_grad_())
    cache = UnturnedCache.behind([Part(leaf, torch.tensor([[0, 3, 4], [0, 1, 5], [1, 2, 3]]), complete=False)], decoder.rotation)
    decoder(x, cache.position[:, None] + torch.arange(2), cache).square().sum().backward()
    assert leaf.keys.grad is not None
    reached = (leaf.keys.grad.abs().sum((0, 2, 4)) > 0).tolist()
    assert reached == [
        [True, False, False, False, True, False],
        [False, True, False, False, False, True],
        [False, True, True, True, False, False],
    ]


def test_a_view_of_rows_goes_on_sharing_what_layers_have_in_common(decoder: Decoder) -> None:
    view = ReadCache.of([whole(block(1))], decoder.rotation)
    rows = view.select(torch.tensor([2, 0]))
    assert rows.position.tolist() == [6, 5] and rows.next(0) is rows.next(1)
    assert torch.equal(rows.view(1).keys, view.view(1).keys[[2, 0]])


def test_what_cannot_be_is_refused_by_name(decoder: Decoder) -> None:
    latents = replace(decoder.config, kv_heads=1, head_dim=10, attention=Latent(q_rank=0, kv_rank=16, nope=6, rope=4, value=5))
    cache = UnturnedCache.empty(2, 1, "cpu", decoder.rotation)
    with pytest.raises(ModelError, match="latents are not kept before their rotation"):
        Decoder(latents)(torch.zeros(1, 1, 24), torch.zeros(1, 1, dtype=torch.long), cache)
    with pytest.raises(InputError, match="there are 2, the cache has 1"):
        UnturnedCache.empty(2, 1, "cpu", decoder.rotation).advance(torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(InputError, match="nothing was read yet"):
        UnturnedCache.empty(2, 1, "cpu", decoder.rotation).view(0)


def test_a_view_of_an_ordinary_cache(decoder: Decoder) -> None:
    """Readers that store nothing take any cache: forked, it goes on and they see what was there."""
    cache = DenseCache.allocate(2, 1, 2, 8, 8, torch.float32, "cpu")
    with torch.no_grad():
        decoder(torch.randn(1, 3, 24), torch.arange(3)[None], cache)
        view = ReadCache.at(cache.fork(), 2)
        before = view.view(1).keys.clone()
        decoder(torch.randn(1, 2, 24), torch.arange(3, 5)[None], cache)
        cache.keep(1, torch.tensor([[2, 3]]))
    assert torch.equal(view.view(1).keys, before) and view.position.tolist() == [3] and isinstance(view, KVCache)
