"""The whole decoder by Triton's kernels, which interpret where there is no GPU, against the same by torch's attention.

Logits of a padded batch, read in two pieces and then token by token, with layers that see a window; over one block of memory, and over
pages that keep older tokens in fewer bits. The other side runs this file under TRITON_INTERPRET=1.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmsdk.attention.mask import Bias, Masks
from mmsdk.attention.tiled import band_of
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.sight import Local
from mmsdk.decoder.transformer import Decoder
from mmsdk.kernels.case import Launch
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.rounded import RoundedPages
from mmsdk.kv.types import KVCache, LayerView

KINDS = ("dense", "int8", "fp8", "int4", "turbo4")
# An odd head, three queries to a key, and a window shorter than the first piece.
CONFIG = DecoderConfig(
    vocabulary=48, width=24, layers=2, heads=3, kv_heads=1, head_dim=10, inner=32, context=128, local=Local((1,), window=7)
)
LENGTHS, PIECES = (25, 14), (20, 5)


def decoder() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    state = Decoder(CONFIG).state_dict()
    # queries and keys large enough that softmax tells tokens apart
    made = {n: torch.randn(x.shape, generator=generator) * (0.6 if "qkv" in n else 0.3) + ("norm" in n) for n, x in state.items()}
    return Decoder.of(CONFIG, made)


def cache_of(kind: str) -> KVCache:
    sizes = CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim
    if kind == "dense":
        return DenseCache.allocate(sizes[0], len(LENGTHS), *sizes[1:], 60, torch.float32, "cpu")
    pages = Pages(*sizes, 40, torch.float32, "cpu")
    return PagedCache.empty(RoundedPages(pages, kind, 40, window=4), len(LENGTHS))


@torch.no_grad()
def logits(kind: str) -> Tensor:
    """Of every real token, those of padding 0."""
    model, cache, outs = decoder(), cache_of(kind), list[Tensor]()
    most, generator = max(LENGTHS), torch.Generator().manual_seed(1)
    ids = torch.randint(0, CONFIG.vocabulary, (len(LENGTHS), most + 2), generator=generator)
    positions = (torch.arange(most + 2) - (most - torch.tensor(LENGTHS))[:, None]).clamp_min(-1)
    for part, at in zip(ids.split([*PIECES, 1, 1], 1), positions.split([*PIECES, 1, 1], 1), strict=True):
        outs.append(model.logits(model(model.embed(part), at, cache)).masked_fill((at < 0)[..., None], 0))
    return torch.cat(outs, 1)


def tell() -> None:
    """The logits of all kinds, and how often each kernel was launched."""
    launched, inner, found = Counter[str](), Launch.__call__, dict[str, object]()

    def counted(launch: Launch) -> None:
        launched[launch.kernel.fn.__module__.rsplit(".")[-1]] += 1
        inner(launch)

    Launch.__call__ = counted  # type: ignore[method-assign]
    for kind in KINDS:
        launched.clear()
        found[kind] = [logits(kind).flatten().tolist(), dict(launched)]
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[list[float], dict[str, int]]]:
    """One process for all."""
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[list[float], dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_give_the_logits_that_torch_gives(kind: str, told: dict[str, tuple[list[float], dict[str, int]]]) -> None:
    ours, launched = told[kind]
    theirs = logits(kind)
    torch.testing.assert_close(torch.tensor(ours).view_as(theirs), theirs, rtol=1e-4, atol=1e-4)
    # both pieces of the prompt in both layers
    assert launched["flash_prefill"] == 4
    # turbo codes are made by torch
    taken = {"dense": set[str](), "turbo4": {"kv_store", "paged_decode"}}.get(kind, {"kv_store", "kv_round", "paged_decode"})
    assert taken == {name for name in ("kv_store", "kv_round", "paged_decode") if launched.get(name)}


def test_rounded_memories_differ_from_exact_ones() -> None:
    """Else the comparison above would say nothing of codes."""
    exact = logits("dense")
    assert all((logits(kind) - exact).abs().max() > 1e-3 for kind in KINDS[1:])


def test_without_triton_nothing_is_a_band() -> None:
    x, positions = torch.randn(2, 1, 6, 8), torch.tensor([[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    view = LayerView(x, x, positions, positions >= 0, (positions >= 0).sum(1))
    mask = Masks(positions, torch.float32, None).of(view)
    assert isinstance(mask, Bias) and not mask.band and not band_of(x, view, mask)


@pytest.mark.parametrize(
    ("positions", "window", "banded"),
    [
        ([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]], 0, True),
        ([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]], 2, True),
        ([[0, 1, -1, 2, 3], [0, 1, 2, 3, 4]], 0, False),  # padding amid the tokens
        ([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]], 0, False),  # behind them
        ([[0, 3, 4, 9, 12], [-1, 1, 2, 3, 4]], 0, True),
        ([[0, 3, 4, 9, 12], [-1, 1, 2, 3, 4]], 2, False),  # a window of positions is none of columns
        ([[0, 2, 1, 3, 4], [-1, 1, 2, 3, 4]], 0, False),
        ([[-1, -1, -1, -1, -1], [0, 1, 2, 3, 4]], 0, True),
    ],
)
def test_a_band_is_told_of_where_positions_make_one(
    positions: list[list[int]], window: int, banded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Triton runs."""
    monkeypatch.setattr("mmsdk.attention.mask.launchable", lambda tensor: True)
    monkeypatch.setattr("mmsdk.attention.launch.launchable", lambda tensor: True)
    at, x = torch.tensor(positions), torch.randn(2, 1, 5, 8)
    view = LayerView(x, x, at, at >= 0, (at >= 0).sum(1))
    of = partial(Masks, at[:, 2:], torch.float32, None, window=window)
    mask, query = of().of(view), x[:, :, 2:]
    assert isinstance(mask, Bias) and bool(mask.band) == banded == bool(band_of(query, view, mask))
    if banded:
        assert mask.band[0].padding.tolist() == (at < 0).sum(1).tolist() and mask.band[0].window == window
        # no kernel gives a gradient, or takes a head as wide as this
        assert not band_of(query.clone().requires_grad_(), view, mask)
        wide = replace(view, keys=torch.zeros(2, 1, 5, 300), values=torch.zeros(2, 1, 5, 300))
        assert not band_of(query.new_zeros(2, 1, 3, 300), wide, mask)
        reach = of(reach=(at[:, 2:] + 1,)).of(view)
        assert isinstance(reach, Bias) and not reach.band


class Pairs(TorchDispatchMode):
    """Whether something that has an entry for every query and column was made."""

    def __init__(self, s: int, t: int) -> None:
        super().__init__()
        self.sizes, self.made = (s, t), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.made |= isinstance(out, Tensor) and out.shape[-2:] == self.sizes
        return out


@pytest.mark.parametrize("window", [0, 3])
def test_of_a_band_no_pairs_are_written_until_somebody_asks(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at, x = torch.arange(5).repeat(2, 1), torch.randn(2, 1, 5, 8)
    at[0] -= 2
    at[0, :2] = -1
    view = LayerView(x, x, at, at >= 0, (at >= 0).sum(1))
    whole = Masks(at[:, 2:], torch.float32, None, window=window).of(view)
    monkeypatch.setattr("mmsdk.attention.mask.launchable", lambda tensor: True)
    monkeypatch.setattr("mmsdk.attention.launch.launchable", lambda tensor: True)
    with Pairs(3, 5) as pairs:
        mask = Masks(at[:, 2:], torch.float32, None, window=window).of(view)
        assert isinstance(mask, Bias) and band_of(x[:, :, 2:], view, mask) and not pairs.made
        assert isinstance(whole, Bias) and torch.equal(mask.bias, whole.bias) and torch.equal(mask.alive, whole.alive) and pairs.made
    assert mask.bias is mask.bias


def test_of_rows_in_order_the_device_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there is nothing to be asked for."""
    monkeypatch.setattr("mmsdk.attention.mask.launchable", lambda tensor: True)
    at, x = torch.arange(5).repeat(2, 1), torch.randn(2, 1, 5, 8)
    told, unknown = (
        LayerView(*(part.to("meta") for part in (x, x, at, at >= 0, (at >= 0).sum(1))), ordered=ordered) for ordered in (True, False)
    )
    # a window that is as long as what there is hides nothing
    for window in (0, 5):
        mask = Masks(at[:, 2:].to("meta"), torch.float32, None, window=window).of(told)
        assert isinstance(mask, Bias) and mask.band[0].window == 0 and mask.band[0].padding.shape == (2,)
    for view, window in ((unknown, 0), (told, 3)):
        with pytest.raises(RuntimeError, match="meta"):
            Masks(at[:, 2:].to("meta"), torch.float32, None, window=window).of(view)


if __name__ == "__main__":
    tell()
