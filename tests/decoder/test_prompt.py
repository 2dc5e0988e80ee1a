"""Prompts in C++ against the same decoder in float32, by torch: every memory, padding, chunks, windows; what is left to the layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import hasten
from mmsdk.decoder.quantised import quantise
from mmsdk.decoder.sight import Local
from mmsdk.decoder.transformer import Decoder, Layer
from mmsdk.kernels.cpu import prompt
from mmsdk.kv.memory import Shape, memory_of
from mmsdk.kv.types import KVCache
from mmsdk.quant.types import Quantize

pytestmark = pytest.mark.skipif(not prompt.ready(), reason="no AVX-512 BF16 here, or no compiler")

CONFIG = DecoderConfig(vocabulary=80, width=96, layers=3, heads=4, kv_heads=2, head_dim=32, inner=128, context=256)
SHAPES = {
    "llama": CONFIG,
    "qwen": replace(CONFIG, qkv_bias=True, qk_norm=True),
    "geglu": replace(CONFIG, activation="gelu_tanh", query_scale=0.5, head_dim=24),
    "window": replace(CONFIG, local=Local((0, 2), 5)),
}
ROWS, PROMPT = 3, 45


def decoders(config: DecoderConfig, scheme: Quantize = "none") -> tuple[Decoder, Decoder]:
    """In bfloat16, with prompts in C++, and the same numbers in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    state = {name: (torch.randn(shape, generator=generator) * 0.1 + ("norm" in name)).bfloat16() for name, shape in shapes.items()}
    fast, plain = Decoder.of(config, state), Decoder.of(config, {name: tensor.float() for name, tensor in state.items()})
    for decoder in (fast, plain):
        quantise(decoder, scheme)
    hasten(fast)
    return fast, plain


@torch.no_grad()
def read(decoder: Decoder, kind: str, side: str, chunk: int) -> Tensor:
    """Scores of all tokens of rows of unequal length, a chunk at a time."""
    ids = torch.randint(0, decoder.config.vocabulary, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    shorter = 4 * torch.arange(ROWS)[:, None]
    places = torch.arange(PROMPT).expand(ROWS, -1)
    positions = places - shorter if side == "left" else places.masked_fill(places >= PROMPT - shorter, -1)
    positions = places if side == "none" else positions.clamp_min(-1)
    config = decoder.config
    shape = Shape(config.layers, config.kv_heads, config.entry, decoder.norm.weight.dtype, torch.device("cpu"))
    cache = memory_of(kind).begin(shape, [PROMPT] * config.layers, [()] * ROWS)[0]
    parts = zip(ids.split(chunk, 1), positions.split(chunk, 1), strict=True)
    hidden = torch.cat([decoder(decoder.embed(part), where, cache) for part, where in parts], 1)
    return decoder.logits(hidden)[positions >= 0]


def agree(found: Tensor, expected: Tensor, most: float = 0.03) -> None:
    """bfloat16 rounds to eight bits, in three layers."""
    found, expected = found.float(), expected.float()
    torch.testing.assert_close(found, expected, rtol=0, atol=most * float(expected.abs().max()))
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.998


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dense", "paged"])
@pytest.mark.parametrize(("side", "chunk"), [("none", PROMPT), ("left", PROMPT), ("right", PROMPT), ("none", 14), ("left", 14)])
def test_prompts_are_read_as_in_float32(shape: str, kind: str, side: str, chunk: int) -> None:
    fast, plain = decoders(SHAPES[shape])
    with torch.no_grad():
        assert all(layer.shortcut.takes(torch.zeros(2, 3, 96).bfloat16()) for layer in fast.layers if isinstance(layer, Layer))
    agree(read(fast, kind, side, chunk), read(plain, kind, side, chunk))


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_codes_are_read_as_in_float32(scheme: Quantize) -> None:
    """Where there is no AMX, what they are multiplied with is rounded to eight bits as well, by groups."""
    fast, plain = decoders(SHAPES["qwen"], scheme)
    agree(read(fast, "dense", "left", PROMPT), read(plain, "dense", "left", PROMPT), most=0.06)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["qwen", "window"])
@pytest.mark.parametrize("kind", ["dense", "paged", "int8", "snapkv:100"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("last", [1, 7, PROMPT])
def test_the_last_tokens_alone_are_what_they_are_among_all(shape: str, kind: str, side: str, last: int) -> None:
    for decoder in decoders(SHAPES[shape]):
        few, also = (ends(decoder, kind, side, wanted) for wanted in (last, 0))
        assert few[0].shape[1] == last
        agree(few[0][:, -1:], also[0][:, -1:])
        if side == "none":
            agree(few[0], also[0][:, -last:])
        agree(few[1], also[1])


def ends(decoder: Decoder, kind: str, side: str, last: int) -> tuple[Tensor, Tensor]:
    """What is asked for of rows that are as long or padded in front, and of a token behind them."""
    shorter = 4 * torch.arange(ROWS)[:, None] * (side == "left")
    ids = torch.randint(0, decoder.config.vocabulary, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    cache, positions = cache_of(decoder, kind, ROWS, PROMPT + 1), (torch.arange(PROMPT) - shorter).clamp_min(-1)
    found = decoder(decoder.embed(ids), positions, cache, last=last)
    return found, decoder(decoder.embed(ids[:, :1]), cache.position[:, None], cache)


def cache_of(decoder: Decoder, kind: str, rows: int, tokens: int) -> KVCache:
    config = decoder.config
    shape = Shape(config.layers, config.kv_heads, config.entry, decoder.dtype, torch.device("cpu"))
    return memory_of(kind).begin(shape, [tokens] * config.layers, [()] * rows)[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "paged", "int8"])
def test_rows_as_long_as_each_other_go_through_all_layers_in_one_call(kind: str) -> None:
    """And a single row's next tokens, but not what is padded, or lies apart from what came before."""
    fast, _ = decoders(CONFIG)

    def taken(cache: KVCache, positions: Tensor) -> bool:
        cache.advance(positions)
        x = torch.zeros(*positions.shape, CONFIG.width).bfloat16()
        return fast.express(x, fast.rotation(positions, x.dtype), cache, range(CONFIG.layers), 1) != ()

    line = torch.arange(20)
    cache = cache_of(fast, kind, 2, 60)
    assert taken(cache, line.expand(2, -1)) and taken(cache, 20 + line.expand(2, -1)) == (kind == "dense")
    single = cache_of(fast, kind, 1, 60)
    assert taken(single, line[None]) and taken(single, 20 + line[None]) == (kind != "int8")
    assert not taken(cache_of(fast, kind, 2, 60), torch.stack((line, line - 3)).clamp_min(-1))


@torch.no_grad()
def test_what_is_no_number_stays_none_in_its_row() -> None:
    fast, _ = decoders(CONFIG)
    x = torch.randn(2, 20, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[1, 7, 3] = float("nan")
    shape = Shape(CONFIG.layers, CONFIG.kv_heads, CONFIG.entry, torch.bfloat16, torch.device("cpu"))
    cache = memory_of("dense").begin(shape, [20] * CONFIG.layers, [()] * 2)[0]
    found = fast(x, torch.arange(20).expand(2, -1), cache).isnan().all(-1)
    assert found[1, 7:].all() and not found[0].any()


@torch.no_grad()
def test_hooks_of_a_layer_are_called() -> None:
    """Of prompts and of single tokens: such a decoder's layers are called one by one."""
    fast, _ = decoders(CONFIG)
    heard = list[tuple[int, ...]]()
    hook = fast.layers[1].register_forward_hook(lambda _, __, out: heard.append(tuple(out.shape)))
    ids = torch.randint(0, CONFIG.vocabulary, (1, 20), generator=torch.Generator().manual_seed(1))
    cache = cache_of(fast, "dense", 1, 21)
    hooked = fast(fast.embed(ids), torch.arange(20)[None], cache), fast(fast.embed(ids[:, :1]), cache.position[:, None], cache)
    assert heard == [(1, 20, CONFIG.width), (1, 1, CONFIG.width)]
    hook.remove()
    again = cache_of(fast, "dense", 1, 21)
    agree(fast(fast.embed(ids), torch.arange(20)[None], again), hooked[0])
    assert len(heard) == 2


@torch.no_grad()
@pytest.mark.parametrize("last", [0, 1])
def test_long_prompts_take_few_layers_at_one_time(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    fast, _ = decoders(CONFIG)
    ids = torch.randint(0, CONFIG.vocabulary, (2, 20), generator=torch.Generator().manual_seed(1))

    def both() -> tuple[Tensor, Tensor]:
        cache = cache_of(fast, "dense", 2, 21)
        found = fast(fast.embed(ids), torch.arange(20).expand(2, -1), cache, last=last)
        return found, fast(fast.embed(ids[:, :1]), cache.position[:, None], cache)

    whole = both()
    monkeypatch.setattr(prompt, "_AT_ONCE", 90)  # two layers, then one
    for found, expected in zip(both(), whole, strict=True):
        assert torch.equal(found, expected)
