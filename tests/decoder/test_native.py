"""Decode steps in C++ against the layers' own way, over every kind of cache, and what each leaves to the layers."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.native import NativeRun, hasten
from mmsdk.decoder.quantised import quantise
from mmsdk.decoder.transformer import Decoder, Layer, NoShortcut, no_express
from mmsdk.kernels.cpu.library import library
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.memory import Shape, memory_of
from mmsdk.kv.types import KVCache
from mmsdk.quant.int4 import Int4, Int4Linear
from mmsdk.quant.int8 import Int8, Int8Linear
from mmsdk.quant.types import Quantize

pytestmark = pytest.mark.skipif(library().functions is None, reason=library().state)

CONFIG = DecoderConfig(vocabulary=80, width=96, layers=3, heads=4, kv_heads=2, head_dim=32, inner=112, context=128)
SHAPES = {
    "llama": CONFIG,
    "qwen": replace(CONFIG, qkv_bias=True, qk_norm=True, tied=False),
    "geglu": replace(CONFIG, activation="gelu_tanh", query_scale=0.5, head_dim=16),
}
PROMPT, SAID = 9, 6
KINDS = [("dense", 1), ("paged", 1), ("paged", 3)]


def decoder(config: DecoderConfig = CONFIG, scheme: Quantize = "none") -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    state = {name: torch.randn(shape, generator=generator) * 0.1 + ("norm" in name) for name, shape in shapes.items()}
    made = Decoder.of(config, {name: tensor.bfloat16() for name, tensor in state.items()})
    quantise(made, scheme)
    return made


def layers(model: Decoder) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]


def plainly(model: Decoder) -> None:
    model.express = no_express
    for layer in layers(model):
        layer.shortcut = NoShortcut()


def cache_of(model: Decoder, kind: str, rows: int) -> KVCache:
    config = model.config
    shape = Shape(config.layers, config.kv_heads, config.entry, torch.bfloat16, torch.device("cpu"))
    return memory_of(kind).begin(shape, [PROMPT + SAID] * config.layers, [()] * rows)[0]


@torch.no_grad()
def steps(model: Decoder, kind: str = "dense", rows: int = 1) -> Tensor:
    """The scores after a prompt of rows of unequal length and after each step, fed with fixed tokens, so that no tie sends them apart."""
    ids = torch.randint(0, model.config.vocabulary, (rows, PROMPT + SAID), generator=torch.Generator().manual_seed(rows))
    positions = torch.arange(PROMPT) - torch.arange(rows)[:, None].clamp_max(2)
    cache = cache_of(model, kind, rows)
    out = [model(model.embed(ids[:, :PROMPT]), positions.clamp_min(-1), cache)[:, -1]]
    for place in range(PROMPT, PROMPT + SAID):
        out.append(model(model.embed(ids[:, place : place + 1]), cache.position[:, None], cache)[:, -1])
    return model.logits(torch.stack(out))


def agree(found: Tensor, expected: Tensor) -> None:
    """bfloat16 rounds to eight bits, in three layers and in other places."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.999


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", ["dense", "paged", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_both_ways_agree(shape: str, scheme: Quantize, kind: str, rows: int) -> None:
    model = decoder(SHAPES[shape], scheme)
    hasten(model)
    fast = steps(model, kind, rows)
    plainly(model)
    agree(fast, steps(model, kind, rows))


@pytest.mark.parametrize("scheme", ["none", "int8", "int4"])
def test_all_layers_in_one_call_and_layer_by_layer_are_the_same_bits(scheme: Quantize) -> None:
    model = decoder(scheme=scheme)
    hasten(model)
    together = [steps(model, kind, rows) for kind, rows in KINDS]
    model.express = no_express
    for (kind, rows), found in zip(KINDS, together, strict=True):
        alone = steps(model, kind, rows)
        # of pages a step of several rows lays them side by side, and torch attends
        assert torch.equal(alone, found) if kind == "dense" else torch.allclose(alone, found, atol=0.03 * float(found.abs().max()))


def test_many_rows_gradients_and_wide_dtypes_go_the_other_way() -> None:
    model = decoder()
    hasten(model)
    step, x = layers(model)[0].shortcut, torch.zeros(16, 1, CONFIG.width).bfloat16()
    assert not step.takes(x)
    with torch.no_grad():
        assert step.takes(x)
        assert not step.takes(x.repeat(2, 1, 1)) and not step.takes(x.repeat(1, 2, 1)) and not step.takes(x.float())
    wide = decoder().float()
    hasten(wide)
    assert wide.express is no_express


def test_weights_that_change_later_are_noticed() -> None:
    model = decoder()
    hasten(model)
    before = steps(model)
    down = layers(model)[1].mlp.down
    down.weight = nn.Parameter(down.weight.detach() * 3)
    changed = steps(model)
    plainly(model)
    agree(changed, steps(model))
    assert not torch.allclose(changed, before, atol=0.1)


def test_a_layer_with_something_else_in_it_is_left_to_itself() -> None:
    model = decoder()
    hasten(model)
    before = steps(model)
    second = layers(model)[1].mlp
    second.down = nn.Sequential(second.down)
    with torch.no_grad():
        assert [layer.shortcut.takes(torch.zeros(1, 1, CONFIG.width).bfloat16()) for layer in layers(model)] == [True, False, True]
    assert isinstance(model.express, NativeRun)
    agree(steps(model), before)


@torch.no_grad()
def test_forks_do_not_write_into_one_another() -> None:
    model = decoder()
    hasten(model)
    cache = cache_of(model, "dense", 1)
    assert isinstance(cache, DenseCache)
    model(model.embed(torch.arange(PROMPT)[None]), torch.arange(PROMPT)[None], cache)
    first, second = cache.fork(), cache.fork()
    said = []
    for held in (first, second, cache):
        token = torch.tensor([[len(said)]])
        model(model.embed(token), held.position[:, None], held)
        said.append(model(model.embed(torch.tensor([[40]])), held.position[:, None], held))
    fresh = cache_of(model, "dense", 1)
    ids = torch.cat((torch.arange(PROMPT), torch.tensor([0, 40])))[None]
    model(model.embed(ids[:, :PROMPT]), torch.arange(PROMPT)[None], fresh)
    for place in (PROMPT, PROMPT + 1):
        alone = model(model.embed(ids[:, place : place + 1]), fresh.position[:, None], fresh)
    assert torch.equal(said[0], alone)
    assert not torch.equal(said[0], said[1]) and not torch.equal(said[1], said[2])


@torch.no_grad()
def test_weights_that_are_cast_and_cast_back_are_noticed() -> None:
    model = decoder()
    hasten(model)
    before = steps(model)
    model.float()
    for parameter in model.parameters():
        parameter.mul_(1.5)
    model.bfloat16()
    changed = steps(model)
    plainly(model)
    agree(changed, steps(model))
    assert not torch.allclose(changed, before, atol=0.1)


def test_a_copy_decodes_by_its_own_weights() -> None:
    model = decoder()
    hasten(model)
    steps(model)
    twin = copy.deepcopy(model)
    before = steps(twin)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(steps(twin), before)


def test_codes_give_gradients_to_what_comes_before_them() -> None:
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    for linear in (Int4Linear(Int4.of(matrix), None), Int8Linear(Int8.of(matrix), None)):
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        linear(x).float().sum().backward()
        assert x.grad is not None and x.grad.abs().sum() > 0
