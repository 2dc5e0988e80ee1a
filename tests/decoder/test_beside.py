"""Prompts and a step side by side: to the bit what each of them gives alone, in one pass where C++ takes them, else one after the other."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.decoder import native
from mmsdk.decoder.beside import Reads, Says, beside
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import hasten
from mmsdk.decoder.prefill import Laid
from mmsdk.decoder.quantised import quantise
from mmsdk.decoder.sight import Local
from mmsdk.decoder.spans import Span
from mmsdk.decoder.transformer import Decoder
from mmsdk.kernels.cpu import prompt
from mmsdk.kv.memory import Shape, memory_of
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.rounded import RoundedPages
from mmsdk.quant.types import Quantize

CONFIG = DecoderConfig(vocabulary=80, width=96, layers=3, heads=4, kv_heads=2, head_dim=32, inner=128, context=256)
SHAPES = {
    "llama": CONFIG,
    "qwen": replace(CONFIG, qkv_bias=True, qk_norm=True),
    "geglu": replace(CONFIG, activation="gelu_tanh", query_scale=0.5),
    "window": replace(CONFIG, local=Local((0, 2), 5)),
    "wide": replace(CONFIG, head_dim=64),
    "odd": replace(CONFIG, head_dim=80),
}
# Tokens of prompts, after so many that are known; of rows that speak.
PROMPTS, SPEAKING = [(45, 0), (20, 16), (3, 0)], [30, 7, 18]


def decoder(config: DecoderConfig, dtype: torch.dtype = torch.bfloat16, scheme: Quantize = "none") -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    made = Decoder.of(
        config, {name: (torch.randn(s, generator=generator) * 0.1 + ("norm" in name)).to(dtype) for name, s in shapes.items()}
    )
    quantise(made, scheme)
    hasten(made)
    return made


def laid(model: Decoder, start: int, stop: int) -> Laid:
    ids = (7 * torch.arange(start, stop) + start) % model.config.vocabulary
    return Laid(model.embed(ids[None])[0], torch.arange(start, stop), (Span(-1, (stop - start,)),))


def pages(model: Decoder, rounded: bool = False, blocks: int = 64) -> Pages | RoundedPages:
    config = model.config
    exact = Pages(config.layers, config.kv_heads, config.head_dim, blocks, model.dtype, "cpu", 4 if rounded else 16)
    return RoundedPages(exact, "int8", 64, 8) if rounded else exact


def parts(model: Decoder, store: Pages | RoundedPages, speaking: Sequence[int] = SPEAKING) -> list[Reads | Says]:
    """Rows that speak, in the middle of two prompts, and another one: those with known tokens have them in neighbouring blocks."""
    rows = []
    for length in speaking:
        rows.append(PagedCache.empty(store, 1))
        Reads(laid(model, 0, length), rows[-1]).alone(model)
    said = (torch.arange(len(speaking)) * 37 + 3) % model.config.vocabulary
    says = Says(said[:, None], PagedCache.joined(rows))
    reads = list[Reads]()
    for new, known in PROMPTS:
        cache = PagedCache.empty(store, 1)
        cache.reserve(new + known)
        if known:
            Reads(laid(model, 0, known), cache).alone(model)
        reads.append(Reads(laid(model, known, known + new), cache))
    return [reads[0], says, *reads[1:]]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Prompts and steps of every pass through C++ that several go through."""
    passes, original = list[tuple[int, int]](), prompt.read_beside

    def noted(layers: Sequence[object], reads: Sequence[object], steps: Sequence[object] = ()) -> object:
        passes.append((len(reads), len(steps)))
        return original(layers, reads, steps)  # type: ignore[arg-type]

    monkeypatch.setattr(native.prompt, "read_beside", noted)
    return passes


def held(part: Reads | Says) -> list[Tensor]:
    views = [part.cache.view(layer) for layer in range(CONFIG.layers)]
    return [x[view.valid[:, None].expand(x.shape[:3])] for view in views for x in (view.keys, view.values)]


@torch.no_grad()
def same(model: Decoder, rounded: bool = False, speaking: Sequence[int] = SPEAKING) -> None:
    together, alone = (parts(model, pages(model, rounded, 64 + 2 * len(speaking)), speaking) for _ in range(2))
    found = beside(model, together)
    for hidden, one, other in zip(found, together, alone, strict=True):
        assert torch.equal(hidden, other.alone(model))
        assert one.cache.position.tolist() == other.cache.position.tolist()
        assert all(map(torch.equal, held(one), held(other)))


@pytest.mark.skipif(not prompt.ready(), reason="no AVX-512 BF16 here, or no compiler")
@pytest.mark.parametrize("at_once", [2**14, 60])
@pytest.mark.parametrize(("shape", "scheme"), [("llama", "none"), ("qwen", "int8"), ("geglu", "int4")])
def test_all_go_through_each_layer_together(shape: str, scheme: Quantize, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, and in one for every layer."""
    monkeypatch.setattr(prompt, "_AT_ONCE", at_once)
    model, passes = decoder(SHAPES[shape], scheme=scheme), counted(monkeypatch)
    with torch.no_grad():
        beside(model, parts(model, pages(model)))
    assert passes.count((3, 1)) == 1
    same(model)


@pytest.mark.skipif(not prompt.ready(), reason="no AVX-512 BF16 here, or no compiler")
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("shape", ["wide", "odd"])
def test_many_rows_speak_beside_prompts(shape: str, scheme: Quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as go through C++ at one time, and more, which do not, nor do heads of no whole number of vectors."""
    model, passes = decoder(SHAPES[shape], scheme=scheme), counted(monkeypatch)
    same(model, speaking=[5 + place % 30 for place in range(16)])
    assert passes.count((3, 1)) == (shape == "wide")
    same(model, speaking=[5 + place % 30 for place in range(21)])
    assert passes.count((3, 1)) == (shape == "wide")


@pytest.mark.skipif(not prompt.ready(), reason="no AVX-512 BF16 here, or no compiler")
def test_several_threads_read_prompts_at_one_time() -> None:
    """Each gets to the bit what it gets alone: the products of C++ keep nothing that two calls share."""
    model = decoder(CONFIG)

    def read(number: int) -> Tensor:
        with torch.no_grad():
            return Reads(laid(model, number, number + 40), PagedCache.empty(pages(model), 1)).alone(model)

    alone = [read(number) for number in range(24)]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(4):
            assert all(map(torch.equal, threads.map(read, range(24)), alone))


@pytest.mark.skipif(not prompt.ready(), reason="no AVX-512 BF16 here, or no compiler")
def test_steps_over_aged_blocks_go_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = decoder(CONFIG), counted(monkeypatch)
    with torch.no_grad():
        said = parts(model, pages(model, True))
        beside(model, [said[0], said[1]])
    assert isinstance(said[1].cache, PagedCache) and said[1].cache.aged and (1, 1) in passes


@pytest.mark.parametrize("what", ["float32", "window", "apart", "aged"])
def test_what_is_not_taken_goes_one_after_the_other(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype, layers with a window, known tokens that do not lie beside the new ones, or that have aged."""
    model = decoder(SHAPES["window" if what == "window" else "llama"], torch.float32 if what == "float32" else torch.bfloat16)
    passes = counted(monkeypatch)
    if what == "apart":
        monkeypatch.setattr(PagedCache, "memory", lambda *_: ())
    same(model, rounded=what == "aged")
    assert not any(steps and reads for reads, steps in passes)


@torch.no_grad()
def test_one_part_is_that_part_alone() -> None:
    model = decoder(CONFIG, torch.float32)
    for one, other in zip(parts(model, pages(model)), parts(model, pages(model)), strict=True):
        assert torch.equal(beside(model, [one])[0], other.alone(model))
    assert beside(model, []) == []


@torch.no_grad()
def test_a_policy_is_told_what_kind_of_tokens_a_prompt_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in company: a memory of several arenas keeps what was seen apart from what was said."""
    model, heard = decoder(CONFIG), list[Tensor]()
    original = PolicyCache.hear
    monkeypatch.setattr(PolicyCache, "hear", lambda cache, kinds, layers: heard.append(kinds) or original(cache, kinds, layers))
    shape = Shape(CONFIG.layers, CONFIG.kv_heads, CONFIG.entry, model.dtype, torch.device("cpu"))

    def reads() -> list[Reads]:
        memory = memory_of("omnitide:32")
        return [Reads(laid(model, 0, 45), memory.begin(shape, [45] * CONFIG.layers, [()])[0]) for _ in range(2)]

    together = beside(model, reads())
    assert len(heard) == 2
    assert all(torch.equal(one, other.alone(model)) for one, other in zip(together, reads(), strict=True))
