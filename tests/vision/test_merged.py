"""Squares of patches that merge as one: which they are, whose places they take, and that like ones lose nothing by it."""

from collections.abc import Sequence

import pytest
import torch

from mmsdk.errors import BudgetError
from mmsdk.tokencomp.methods.tome import ToMe
from mmsdk.vision.encoders.qwen_vl import QwenVL
from mmsdk.vision.merged import Merged, planned, together
from mmsdk.vision.shorten import Area, Shortening
from mmsdk.vision.smart_resize import SmartResize
from mmsdk.vision.tower import Tower, TowerConfig
from mmsdk.vision.types import Image, Video
from mmsdk.vision.vit import ViT, ViTConfig

CPU = torch.device("cpu")


def test_an_area_is_told_square_by_square_behind_what_is_outside() -> None:
    """A view of four rows and five columns, without its first column and its last row."""
    area = Area(0, 3, 1, 5, 2)
    assert area.grid == (1, 2) and area.count == 2
    assert area.order((4, 5), CPU).tolist() == [0, 5, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 1, 2, 6, 7, 3, 4, 8, 9]
    assert Area(0, 0, 0, 0).order((2, 2), CPU).tolist() == [0, 1, 2, 3]


def vit_of(class_token: bool) -> ViT:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=24, layers=3, heads=3, hidden=48, grid=6, class_token=class_token)).eval().requires_grad_(False)
    for block in vit.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.5)
    # patches that look alike are alike
    vit.position.zero_()
    return vit


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("area", [Area(0, 6, 0, 6, 3), Area(0, 6, 0, 6, 2), Area(2, 6, 0, 4, 2), Area(1, 5, 0, 6)], ids=str)
def test_squares_that_are_alike_become_one_and_nothing_changes(class_token: bool, area: Area) -> None:
    """What merges counts as often as it has patches, so that of pairs of equal ones either may be left out: an exact answer."""
    vit, (rows, columns), side = vit_of(class_token), area.grid, area.side
    picture = torch.randn(1, 3, 6 * 14, 6 * 14, generator=torch.Generator().manual_seed(1))
    planes = picture.view(1, 3, 6, 14, 6, 14)
    for number in range(1, rows * columns, 2):
        (top, left), (to, across) = (divmod(one, columns) for one in (number - 1, number))
        for row in range(side):
            for column in range(side):
                here, there = (area.top + top * side + row, area.left + left * side + column), (to * side + row, across * side + column)
                planes[:, :, area.top + there[0], :, area.left + there[1]] = planes[:, :, here[0], :, here[1]]
    half = -(-area.count // 2)
    plain = vit(picture).tokens[0]
    out = vit(picture, shortening=Shortening(ToMe(), (*ToMe().plan(area.count, half, 1), half, half), (area,)))
    groups = out.groups.tokens(area, (6, 6))
    assert groups.size.sum() == area.count and groups.size.shape == (1, half)
    order = area.order((6, 6), CPU)[36 - area.count * side**2 :].view(-1, side**2)
    owner = groups.owner[0].tolist()
    assert all(owner[number] == owner[number - 1] for number in range(1, area.count, 2))
    torch.testing.assert_close(out.tokens[0].view(half, side**2, -1)[groups.owner[0]], plain[order], rtol=1e-3, atol=1e-4)


def test_views_come_to_parts_like_their_parts_of_all() -> None:
    areas = [Area(0, 6, 0, 6), Area(0, 3, 0, 4), Area(0, 0, 0, 0), Area(0, 1, 0, 1)]
    for count in (3, 10, 24, 48, 49):
        plans = planned(areas, ToMe(), count, 6)
        parts = [plan.counts[-1] if plan.counts else area.count for plan, area in zip(plans, areas, strict=True)]
        assert sum(parts) == count and parts[2] == 0 and parts[3] == 1
        assert all(0 < part <= area.count for part, area in zip(parts, areas, strict=True) if area.count)
    with pytest.raises(BudgetError, match="each of 3 views"):
        planned(areas, ToMe(), 2, 6)


def test_tokens_of_several_views_are_read_by_their_places() -> None:
    """Two views side by side, whose rows take turns: owners follow their tokens."""

    def view(seed: int, owner: Sequence[int]) -> Merged:
        m = max(owner) + 1
        values = torch.arange(m).float() + 10 * seed
        told = (torch.zeros(m, 2, dtype=torch.int64), torch.tensor(owner), torch.zeros(len(owner)))
        return Merged(values[:, None], values, values[:, None], torch.ones(m), *told)

    left, right = (torch.tensor([[0, row, column] for row in range(2)]) for column in range(2))
    found = together([view(0, [0, 1]), view(1, [1, 0])], [left, right], [left, right], (1, 2, 2), torch.zeros(1))
    assert found.tokens.features[:, 0].tolist() == [0, 10, 1, 11] and found.owner.tolist() == [0, 3, 2, 1]
    assert found.positions.tolist() == found.tokens.positions.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]


@pytest.mark.parametrize(("window", "deep"), [(0, (0, 2)), (4, ())])
def test_a_tower_at_its_own_aspect_merges_whole_tokens(window: int, deep: tuple[int, ...]) -> None:
    """Every patch is in one token, a step of a clip by itself, an odd last frame weighs half, and places are means of what was merged."""
    torch.manual_seed(0)
    config = TowerConfig(32, 3, 2, 48, 24, patch=4, window=window, full=(1,) if window else (), deep=deep)
    fit = SmartResize(least=64, most=48 * 48, patch=4, merge=2, time=2)
    encoder = QwenVL(Tower(config).eval().requires_grad_(False), fit, fit)
    noise = torch.randint(0, 256, (3, 3, 24, 40), dtype=torch.uint8)
    media: list[Image | Video] = [Image(noise[0]), Video(noise, torch.arange(3) / 2), Image(noise[1])]
    plans = [encoder.plan((24, 40), f, ToMe(), count) for f, count in ((1, 5), (3, 13), (1, 5))]
    results = encoder.shortened(media, plans)
    for item, found, whole in zip(media, results, encoder(media), strict=True):
        tokens = found.tokens
        assert tokens.features.isfinite().all() and tokens.saliency.isfinite().all() and len(tokens.deep) == len(deep)
        assert torch.equal(found.positions, whole.positions) and tokens.grid == whole.grid
        weight = torch.zeros(len(tokens)).index_add_(0, found.owner, whole.weight)
        torch.testing.assert_close(tokens.weight, weight)
        for number in range(len(tokens)):
            mine = found.positions[found.owner == number].float()
            assert tokens.positions[number].tolist() == (mine.mean(0) + 0.5).floor().tolist() and len(set(mine[:, 0].tolist())) == 1
        (alone,) = encoder.shortened([item], [plans[0] if isinstance(item, Image) else plans[1]])
        torch.testing.assert_close(alone.tokens.features, tokens.features)
