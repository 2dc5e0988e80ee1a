"""Decode steps in C++ over keys and values in fewer bits, against numbers written out and attended to by torch."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import hasten
from mmsdk.decoder.rope import Rotation
from mmsdk.decoder.transformer import Decoder, no_express
from mmsdk.kernels.cpu.library import library
from mmsdk.kernels.cpu.rounded import FORMS
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.rounded import PAGE, RoundedPages
from mmsdk.kv.rounding import Bits, names
from mmsdk.kv.types import KVCache

pytestmark = pytest.mark.skipif(library().functions is None, reason=library().state)

CONFIG = DecoderConfig(vocabulary=80, width=96, layers=2, heads=6, kv_heads=2, head_dim=32, inner=112, context=1024)
WINDOW, SAID = 40, 3


def decoder(config: DecoderConfig) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    state = Decoder(config).state_dict()
    for name, tensor in state.items():
        # queries and keys large enough that softmax tells tokens apart
        state[name] = (torch.randn(tensor.shape, generator=generator) * (0.2 if "qkv" in name else 0.1) + ("norm" in name)).bfloat16()
    return Decoder.of(config, state)


def cache_of(config: DecoderConfig, bits: Bits, rows: int) -> PagedCache:
    pages = Pages(config.layers, config.kv_heads, config.head_dim, 40 * rows, torch.bfloat16, torch.device("cpu"), PAGE)
    return PagedCache.empty(RoundedPages(pages, bits, 30 * rows, WINDOW), rows)


class Watched:
    """The way of a decoder through all layers at once, and how often a step took it."""

    def __init__(self, decoder: Decoder) -> None:
        self.inner, self.taken = decoder.express, 0

    def __call__(self, x: Tensor, rotation: Rotation, cache: KVCache, layers: range, last: int) -> tuple[Tensor, ...]:
        out = self.inner(x, rotation, cache, layers, last)
        self.taken += bool(out) and x.shape[1] == 1
        return out


@torch.no_grad()
def steps(model: Decoder, cache: PagedCache, lengths: tuple[int, ...]) -> Tensor:
    """The streams of steps behind prompts of these lengths."""
    most, generator = max(lengths), torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocabulary, (len(lengths), most + SAID), generator=generator)
    positions = torch.arange(most) - (most - torch.tensor(lengths))[:, None]
    for part in range(0, most, 100):
        here = slice(part, min(most, part + 100))
        model(model.embed(ids[:, here]), positions[:, here].clamp_min(-1), cache)
    each = (ids[:, place : place + 1] for place in range(most, most + SAID))
    return torch.cat([model(model.embed(one), cache.position[:, None], cache) for one in each], 1).float()


def test_every_rounding_has_its_form() -> None:
    assert set(FORMS) == set(names())


@pytest.mark.parametrize("bits", names())
@pytest.mark.parametrize(
    ("config", "lengths"),
    [(CONFIG, (500,)), (CONFIG, (333, 60, 90)), (replace(CONFIG, head_dim=96, heads=2), (150,))],
    ids=["one row, several parts", "rows with and without old tokens", "a wide head that shares nothing"],
)
def test_codes_are_read_as_the_numbers_that_they_stand_for(bits: Bits, config: DecoderConfig, lengths: tuple[int, ...]) -> None:
    model = decoder(config)
    hasten(model)
    model.express = watched = Watched(model)
    fast = steps(model, cache_of(config, bits, len(lengths)), lengths)
    assert watched.taken == SAID
    model.express = no_express
    plain = steps(model, cache_of(config, bits, len(lengths)), lengths)
    assert torch.cosine_similarity(fast, plain, dim=-1).min() > 0.999
    torch.testing.assert_close(fast, plain, rtol=0, atol=0.03 * float(plain.abs().max()))


@torch.no_grad()
def test_an_old_number_that_is_none_makes_the_step_none() -> None:
    model = decoder(CONFIG)
    hasten(model)
    cache = cache_of(CONFIG, "int8", 1)
    steps(model, cache, (100,))
    store = cache._store
    assert isinstance(store, RoundedPages)
    store._keys.kept.low[0, :, :, 0, 0] = math.nan
    out = model(model.embed(torch.zeros(1, 1, dtype=torch.long)), cache.position[:, None], cache)
    assert out.isnan().all()
