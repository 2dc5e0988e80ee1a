"""A transformer over views: against VGGT's own aggregator, its layers in complex numbers, and what ReSS promises over its attention."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.blocks import kept_most, pooled, scores
from mmsdk.diffusion.attention.methods.ress import Ress
from mmsdk.diffusion.attention.types import Blocks, Selection
from mmsdk.diffusion.views import DenseViews, RestoredViews, Views, ViewsConfig
from mmsdk.errors import InputError

TINY = ViewsConfig(heads=2, head_dim=16, layers=2, patch=4, scaled=0.5)
VIEWS, ROWS, COLUMNS = 5, 6, 7


@pytest.fixture(scope="module")
def model() -> Views:
    torch.manual_seed(0)
    made = Views(TINY)
    for name, parameter in made.named_parameters():
        if name.endswith("norm.weight"):
            # no two channels count the same
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    torch.nn.init.normal_(made.special)
    return made.eval().requires_grad_(False)


def pictures(views: int = VIEWS) -> Tensor:
    return torch.randn(1, views, 3, 4 * ROWS, 4 * COLUMNS, generator=torch.Generator().manual_seed(1))


def slow_layer(layer: torch.nn.Module, x: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """One sequence, [n, e], head by head; pairs of channels as complex numbers."""
    part = {name: value.double() for name, value in layer.state_dict().items()}

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ part[f"{name}.weight"].T + part[f"{name}.bias"]

    def norm(name: str, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * part[f"{name}.weight"] + part[f"{name}.bias"]

    def turn(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
        rates = [100.0 ** (-i / 4) for i in range(4)]
        angles = torch.tensor([[row * rate for rate in rates] + [column * rate for rate in rates] for row, column in places])
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    normed = norm("norm", x)
    outs = []
    for head in range(TINY.heads):
        own = slice(16 * head, 16 * head + 16)
        query = turn(norm("query_norm", linear("query", normed)[:, own]))
        keys = turn(norm("key_norm", linear("key", normed)[:, own]))
        outs.append((query @ keys.T / 4).softmax(-1) @ linear("value", normed)[:, own])
    x = x + part["scale"] * linear("out", torch.cat(outs, -1))
    return x + part["scale_up"] * linear("down", F.gelu(linear("up", norm("norm_up", x))))


def test_layers_go_within_views_and_across_them(model: Views) -> None:
    given = pictures()
    special, weight, bias = model.special.double(), model.patch.weight.double(), model.patch.bias.double()
    views = []
    for view in range(VIEWS):
        cells = [given[0, view, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4].flatten() for r in range(ROWS) for c in range(COLUMNS)]
        views.append(torch.cat((special[0 if view == 0 else 1], torch.stack(cells).double() @ weight.T + bias)))
    places = [(0, 0)] * 5 + [(r + 1, c + 1) for r in range(ROWS) for c in range(COLUMNS)]
    for within, across in zip(model.within, model.across, strict=True):
        inner = [slow_layer(within, view, places) for view in views]
        views = list(slow_layer(across, torch.cat(inner), places * VIEWS).split(len(places)))
    expected = torch.cat((torch.stack(inner), torch.stack(views)), -1)[None]
    torch.testing.assert_close(model(given).double(), expected, rtol=1e-4, atol=1e-4)


def test_tokens_are_those_of_vggt() -> None:
    """What VGGT's code gave for weights and pictures that are waves of their places in memory; it norms pictures by ImageNet's colours."""
    golden = json.loads(Path(__file__).with_name("views_golden.json").read_text(encoding="utf-8"))
    model = Views(ViewsConfig(**golden["config"])).requires_grad_(False)
    for number, (name, part) in enumerate(sorted(model.named_parameters())):
        wave = torch.sin(torch.arange(part.numel(), dtype=torch.float64) * (0.37 + 0.11 * number) + number).view(part.shape)
        size = 0.3 if "norm" in name or name == "special" else 1.2 * part.shape[-1] ** -0.5
        middle = 1.0 if name.endswith(("norm.weight", "norm_up.weight")) else 0.5 if ".scale" in name else 0.0
        part.copy_(middle + size * wave)
    shape = golden["pictures"]
    given = (0.5 + 0.5 * torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 0.731)).view(shape).float()
    mean, spread = (torch.tensor(colours).view(3, 1, 1) for colours in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    found = model((given - mean) / spread)[..., :: golden["every"]]
    torch.testing.assert_close(found.flatten(), torch.tensor(golden["values"]), rtol=0, atol=1e-4)


def test_views_behind_the_first_may_come_in_any_order(model: Views) -> None:
    order = torch.tensor([0, 3, 1, 4, 2])
    given = pictures()
    torch.testing.assert_close(model(given[:, order]), model(given)[:, order], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(given[:, [1, 0, 2, 3, 4]])[:, 0], model(given)[:, 1], atol=1e-2), "the first view is another"


@dataclass(frozen=True)
class ByMass:
    """As many blocks as ReSS keeps, the ones with the most attention, special ones among them."""

    method: Ress

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, special: Tensor, projection: Tensor) -> Tensor:
        blocks = Blocks(self.method.block, query.shape[2])
        ours = self.method.selection(query, keys, values, projection, special).mask
        always = ours.all(2).all(1)[0]
        shares = scores(pooled(query, blocks), pooled(keys, blocks)).softmax(-1).masked_fill(always, torch.inf)
        kept = kept_most(shares, int(ours[0, 0, ~always].sum(-1).min()))
        return attend(query, keys, values, Selection(kept | always | always[:, None], blocks, blocks))


@dataclass(frozen=True)
class Drifting:
    """Runs dense, and notes how far an attention moves what a layer adds to the stream."""

    ways: list[ByMass | RestoredViews]
    found: list[list[float]] = field(default_factory=list)

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, special: Tensor, projection: Tensor) -> Tensor:
        dense = DenseViews()(query, keys, values, special, projection)
        made = [way(query, keys, values, special, projection) for way in self.ways]
        added = [torch.einsum("bhsd,hed->bse", out, projection) for out in (dense, *made)]
        self.found.append([float((one - added[0]).norm() / added[0].norm()) for one in added[1:]])
        return dense


def test_ress_moves_the_stream_less_than_the_most_attention_does_and_keeps_special_tokens_dense(model: Views) -> None:
    """At as many blocks, in every layer, of smooth pictures, where a block's mean tells of its tokens; where all is kept nothing moves."""
    coarse = torch.randn(8 * 3, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    smooth = 2 * F.interpolate(coarse, size=(48, 48), mode="bicubic").view(1, 8, 3, 48, 48)
    method = Ress(sparsity=0.73, block=8)
    drifting = Drifting([RestoredViews(method), ByMass(method)])
    model(smooth, drifting)
    assert len(drifting.found) == TINY.layers
    assert all(0 < ours < 0.7 * mass for ours, mass in drifting.found), drifting.found
    given = pictures()
    whole, sparse = (model(given, RestoredViews(replace(method, sparsity=share))) for share in (0.0, 0.5))
    torch.testing.assert_close(whole, model(given), rtol=1e-4, atol=1e-4)
    assert sparse.isfinite().all() and not torch.allclose(sparse, whole, atol=1e-3)


def test_what_patches_do_not_divide_is_refused(model: Views) -> None:
    with pytest.raises(InputError, match="patches are of 4 x 4"):
        model(torch.zeros(1, 2, 3, 10, 12))
    with pytest.raises(InputError, match="heads of 6"):
        Views(ViewsConfig(head_dim=6))
