"""Vision blocks in C++ beside the same blocks by torch, and what is left to torch."""

import pytest
import torch
from torch import Tensor, nn

from mmsdk.kernels.cpu import prompt
from mmsdk.kernels.cpu.library import library
from mmsdk.vision import tower, vit
from mmsdk.vision.native import everywhere
from mmsdk.vision.packed import Rows, attention
from mmsdk.vision.taps import Taps
from mmsdk.vision.tower import Tower, TowerConfig
from mmsdk.vision.vit import ViT, ViTConfig

needs_tiles = pytest.mark.skipif(not prompt.ready(), reason=library().state)
CONFIG = ViTConfig(width=64, layers=3, heads=2, hidden=96, patch=8, grid=4)
TAPS = Taps(hidden=(1,), keys=(-1,), first_rows=(-1,), mean_rows=(0,))


def seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and attention by torch."""
    monkeypatch.setattr(prompt, "ready", lambda: False)


def apart(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).abs().mean() / expected.abs().mean()).item()


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_transformer_is_as_near_to_float32_as_torch_is(activation: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ViTConfig(64, 3, 2, 96, 8, 4, class_token=not plain, layer_scale=not plain, activation=activation)
    model, pixels = seeded(ViT(config)), torch.randn(3, 3, 48, 40, generator=torch.Generator().manual_seed(1))
    assert isinstance(model, ViT)
    exact = model(pixels, TAPS)
    half = model.bfloat16()
    assert all(isinstance(one, vit.Block) and one.native(torch.ones(1, 64).bfloat16()) for one in half.blocks)
    ours = half(pixels.bfloat16(), TAPS)
    off(monkeypatch)
    theirs = half(pixels.bfloat16(), TAPS)
    assert apart(ours.tokens, exact.tokens) <= 1.2 * apart(theirs.tokens, exact.tokens)
    assert not torch.equal(ours.tokens, theirs.tokens), "both went one way"
    for name in ("hidden", "keys", "first_rows", "mean_rows"):
        for layer, found in getattr(ours.taps, name).items():
            expected = getattr(exact.taps, name)[layer]
            assert apart(found, expected) <= 1.5 * apart(getattr(theirs.taps, name)[layer], expected) + 1e-3


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("window", [0, 4])
def test_a_tower_is_as_near_to_float32_as_torch_is(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TowerConfig(width=64, layers=3, heads=2, hidden=96, language=48, patch=4, window=window, full=(1,) if window else ())
    model = seeded(Tower(config))
    assert isinstance(model, Tower)
    patches = torch.randn(2, 48, 96, generator=torch.Generator().manual_seed(1))
    exact = model(patches, (8, 6)).features
    half = model.bfloat16()
    assert all(isinstance(one, tower.Block) and one.native(torch.ones(1, 1, 64).bfloat16()) for one in half.blocks)
    ours = half(patches.bfloat16(), (8, 6)).features
    off(monkeypatch)
    theirs = half(patches.bfloat16(), (8, 6)).features
    assert apart(ours, exact) <= 1.2 * apart(theirs, exact)
    assert not torch.equal(ours, theirs), "both went one way"


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("lengths", [(37, 37, 37), (5, 41, 41, 2, 5), (1, 39), (70, 33)])
def test_rows_of_any_length_are_attended_as_near_to_float32(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As they lie in the projection: queries, keys and values side by side."""
    qkv = torch.randn(sum(lengths), 3, 2, 32, generator=torch.Generator().manual_seed(1))
    rows = Rows(lengths, torch.cat([100 * row + torch.arange(n) for row, n in enumerate(lengths)]), 100, 1)
    exact = attention(*qkv.unbind(1), rows)
    ours = attention(*qkv.bfloat16().unbind(1), rows)
    off(monkeypatch)
    theirs = attention(*qkv.bfloat16().unbind(1), rows)
    assert apart(ours, exact) <= 1.2 * apart(theirs, exact) and not torch.equal(ours, theirs), "both went one way"


@needs_tiles
@torch.no_grad()
@pytest.mark.parametrize("tokens", [33, 50, 257])
def test_keys_that_stand_for_many_are_weighed_as_near_to_float32(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What merging adds to the scores, of each row its own; the exact weights are the sizes times the exponentials."""
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 2, tokens, 2, 32, generator=generator).bfloat16().transpose(2, 3).unbind(0)
    size = torch.randint(1, 9, (2, tokens), generator=generator)
    shares = (query.double() @ key.double().transpose(2, 3) / 32**0.5).exp() * size[:, None, None]
    exact = (shares / shares.sum(dim=3, keepdim=True) @ value.double()).float()
    ours = everywhere(query, key, value, size.float().log())
    off(monkeypatch)
    theirs = everywhere(query, key, value, size.float().log())
    assert apart(ours, exact) <= 1.2 * apart(theirs, exact) < 0.03 and not torch.equal(ours, theirs), "both went one way"


class Adapted(nn.Linear):
    """A map that is more than its weight, as adapters make of one."""


@needs_tiles
def test_everything_else_goes_the_blocks_own_way() -> None:
    x = torch.ones(2, 5, 64).bfloat16()
    block = vit.Block(CONFIG).bfloat16()
    assert block.native(x) is None, "gradients"
    with torch.no_grad():
        assert block.native(x.float()) is None, "other rows"
        assert block.float().native(x) is None, "other weights"
        assert vit.Block(ViTConfig(64, 3, 2, 96, 8, 4, activation="swiglu")).bfloat16().native(x) is None, "gated"
        assert vit.Block(ViTConfig(64, 3, 2, 100, 8, 4)).bfloat16().native(x) is None, "no whole tiles"
        block = vit.Block(CONFIG).bfloat16()
        block.o = Adapted(64, 64).bfloat16()
        assert block.native(x) is None, "adapters"
        gated = TowerConfig(64, 1, 2, 96, 48, gated=True, rms=True)
        assert tower.Block(gated).bfloat16().native(x) is None, "norms that keep the mean"


@needs_tiles
def test_a_block_that_was_given_other_weights_uses_them() -> None:
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    block = vit.Block(CONFIG).bfloat16()
    with torch.no_grad():
        first = block.feed(x, block.native(x))
        block.mlp.down = nn.Linear(96, 64).bfloat16()
        second = block.feed(x, block.native(x))
        assert not torch.equal(first, second)
        torch.testing.assert_close(second, block.feed(x), rtol=2e-2, atol=2e-2)
