"""ReSS: drift in Gram form against drift in the residual stream itself, and what the rounds promise."""

import pytest
import torch
from torch import Tensor

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.blocks import kept_most, pooled, scores
from mmsdk.diffusion.attention.methods.ress import Ress
from mmsdk.diffusion.attention.ress import drop_scores, gram, restore, set_drift
from mmsdk.diffusion.attention.types import Blocks, Grid, Place, Selection
from mmsdk.errors import InputError

NONE = torch.zeros(40, dtype=torch.bool)


def made(rows: int = 30, columns: int = 40, h: int = 3, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """P, V and W_O of every head, in float64."""
    draw = torch.Generator().manual_seed(0)
    shares = (2 * torch.randn(1, h, rows, columns, generator=draw, dtype=torch.float64)).softmax(-1)
    return shares, torch.randn(1, h, columns, d, generator=draw, dtype=torch.float64), torch.randn(h, 20, d, generator=draw)


def moved(kept: Tensor, shares: Tensor, values: Tensor, projection: Tensor) -> Tensor:
    """|W_O (dense - sparse)| of every row, computed as it is defined."""
    sparse = shares.masked_fill(~kept, 0)
    apart = shares @ values - sparse / sparse.sum(-1, keepdim=True) @ values
    return torch.einsum("hed,bhrd->bhre", projection.double(), apart).norm(dim=-1)


def test_the_score_of_a_block_is_the_drift_of_its_drop() -> None:
    shares, values, projection = made()
    ours = drop_scores(shares, values, gram(projection).double())
    for j in range(40):
        kept = torch.ones_like(shares, dtype=torch.bool)
        kept[..., j] = False
        torch.testing.assert_close(ours[..., j], moved(kept, shares, values, projection), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_drift_of_a_set_in_gram_form_is_the_drift(share: float) -> None:
    shares, values, projection = made()
    kept = torch.rand(shares.shape, generator=torch.Generator().manual_seed(1)) < share
    kept[..., 0] = True
    drift = set_drift(kept, shares, values, gram(projection).double())
    torch.testing.assert_close(drift.sqrt(), moved(kept, shares, values, projection), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 4, 12, 39, 40])
def test_rounds_never_raise_the_drift_and_keep_the_budget(count: int) -> None:
    shares, values, projection = made()
    metric = gram(projection).double()
    marks = drop_scores(shares, values, metric)
    before = torch.full(shares.shape[:3], torch.inf, dtype=torch.float64)
    for rounds in range(6):
        kept = restore(marks, shares, values, metric, count, NONE, rounds)
        drift = set_drift(kept, shares, values, metric)
        assert (kept.sum(-1) == count).all() and (drift <= before).all()
        before = drift
    start = set_drift(restore(marks, shares, values, metric, count, NONE, 0), shares, values, metric)
    assert count > 30 or before.mean() < 0.9 * start.mean()


def test_special_blocks_are_in_and_count() -> None:
    shares, values, projection = made()
    always = torch.arange(40) % 13 == 5
    metric = gram(projection).double()
    kept = restore(drop_scores(shares, values, metric), shares, values, metric, 6, always)
    assert kept[..., always].all() and (kept.sum(-1) == 6).all()
    full = restore(drop_scores(shares, values, metric), shares, values, metric, 3, always)
    assert (full == always).all()


def test_drift_is_a_better_guide_than_attention_mass() -> None:
    """Some blocks have much attention and a value like the mean: dropping them moves nothing."""
    shares, values, projection = made()
    values[:, :, :12] = values[:, :, :12] / 10
    shares[..., :12] *= 3
    shares = shares / shares.sum(-1, keepdim=True)
    metric = gram(projection).double()
    marks = drop_scores(shares, values, metric)
    sets = [restore(marks, shares, values, metric, 10, NONE), kept_most(shares, 10)]
    ours, mass = (moved(kept, shares, values, projection).mean().item() for kept in sets)
    assert ours < 0.8 * mass


def test_it_is_a_better_guide_than_chance() -> None:
    shares, values, projection = made()
    metric = gram(projection).double()
    chance = kept_most(torch.rand(shares.shape, generator=torch.Generator().manual_seed(2)), 10)
    sets = [restore(drop_scores(shares, values, metric), shares, values, metric, 10, NONE), chance]
    ours, drawn = (moved(kept, shares, values, projection).mean().item() for kept in sets)
    assert ours < 0.5 * drawn


def test_camera_and_register_tokens_stay_dense_wherever_they_stand() -> None:
    """As in VGGT: five special tokens before the 6 x 7 patches of every view."""
    views, d = 6, 16
    query, keys, values = (torch.randn(1, 2, views * 47, d, generator=torch.Generator().manual_seed(n)) for n in range(3))
    special = torch.arange(views * 47) % 47 < 5
    choice = Ress(sparsity=0.6, block=16).selection(query, keys, values, torch.randn(2, 24, d), special)
    touched = torch.zeros(-(-views * 47 // 16), dtype=torch.bool)
    touched[special.nonzero().flatten() // 16] = True
    assert choice.mask[:, :, touched].all() and choice.mask[..., touched].all()
    assert (choice.mask[:, :, ~touched].sum(-1) == max(round(0.4 * len(touched)), int(touched.sum()))).all()
    assert attend(query, keys, values, choice).isfinite().all()


def test_the_method_is_the_algorithm_over_block_means_and_repeats() -> None:
    grid = Grid(4, 9, 9)
    query, keys, values = (torch.randn(1, 2, grid.tokens, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    projection = torch.randn(2, 24, 16)
    choice, again = (Ress(block=16)(query, keys, values, Place(grid, projection=projection)) for _ in range(2))
    assert isinstance(choice, Selection) and isinstance(again, Selection) and torch.equal(choice.mask, again.mask)
    blocks = Blocks(16, grid.tokens)
    shares = scores(pooled(query, blocks), pooled(keys, blocks)).softmax(-1)
    means, metric = pooled(values, blocks), gram(projection)
    nothing = torch.zeros(blocks.count, dtype=torch.bool)
    assert torch.equal(choice.mask, restore(drop_scores(shares, means, metric), shares, means, metric, round(0.27 * blocks.count), nothing))


def test_without_a_projection_it_says_what_it_needs() -> None:
    x = torch.zeros(1, 2, 64, 16)
    with pytest.raises(InputError, match=r"output projection, cut by heads, in Place\.projection"):
        Ress()(x, x, x, Place(Grid(1, 8, 8)))
