"""Braco against its steps written out sum by sum in NumPy, and what a transform coder promises."""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.coder import Trained, read_coder, untrained
from mmsdk.tokencomp.fidelity import compressibility, learnability
from mmsdk.tokencomp.layout import layout
from mmsdk.tokencomp.methods.braco import Braco
from mmsdk.tokencomp.transform import cayley, low
from mmsdk.vision.types import VisualTokens

Tokens = Callable[..., VisualTokens]
CPU = torch.device("cpu")


def cosine(u: int, j: int, n: int) -> float:
    return math.sqrt((1 if u == 0 else 2) / n) * math.cos(math.pi * u * (2 * j + 1) / (2 * n))


def part_of(j: int, n: int, parts: int) -> int:
    """The part that the middle of cell j lies in."""
    return math.floor((j + 0.5) * parts / n + 1e-12)


def shape_of(grid: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The box of proportions nearest the grid's, the largest of those."""
    boxes = [b for b in np.ndindex(*grid) if math.prod(side + 1 for side in b) <= most]
    sides = [tuple(side + 1 for side in b) for b in boxes]

    def spread(b: tuple[int, ...]) -> float:
        ratios = [math.log(side / n) for side, n in zip(b, grid, strict=True) if n > 1] or [0.0]
        return round(max(ratios) - min(ratios), 9)

    return min(sides, key=lambda b: (spread(b), -math.prod(b), b))


def pool_of(cell: tuple[int, ...], grid: tuple[int, ...], count: int) -> int:
    """The residual part of a cell: time first, then rows of parts."""
    (t, y, x), (frames, height, width) = cell, grid
    times = min(frames, count)
    here = part_of(t, frames, times)
    some = (here + 1) * count // times - here * count // times
    bands = min(max(round(math.sqrt(some * height / width)), -(-some // width), 1), min(height, some))
    row = part_of(y, height, bands)
    across = (row + 1) * some // bands - row * some // bands
    return here * count // times + row * some // bands + part_of(x, width, across)


def coded(tokens: VisualTokens, k: int) -> tuple[np.ndarray, list[int]]:
    """Tokens in raster order and the cells that they sit in, by the steps of the reconstruction, untrained."""
    grid, x = tokens.grid, tokens.features.double().numpy()
    cells = list(np.ndindex(*grid))
    wanted = k // 4 if k >= 8 else 0
    box = shape_of(grid, k - wanted)
    coefficients = list(np.ndindex(*box))

    def wave(place: tuple[int, ...], cell: tuple[int, ...], shape: tuple[int, ...]) -> float:
        return math.prod(cosine(u, j, n) for u, j, n in zip(place, cell, shape, strict=True))

    y = [sum(wave(c, cell, grid) * x[i] for i, cell in enumerate(cells)) for c in coefficients]
    smooth = np.array([sum(wave(c, cell, grid) * y[j] for j, c in enumerate(coefficients)) for cell in cells])
    energy = ((x - smooth) ** 2).sum(axis=1)

    found: list[tuple[int, np.ndarray]] = []
    for place in np.ndindex(*box):
        token = sum(wave(c, place, box) * y[j] for j, c in enumerate(coefficients)) / math.sqrt(len(cells) / len(coefficients))
        centre = tuple(math.floor((p + 0.5) * n / b) for p, n, b in zip(place, grid, box, strict=True))
        found.append((cells.index(centre), token))
    pools = [pool_of(cell, grid, k - len(coefficients)) if k > len(coefficients) else -1 for cell in cells]
    for pool in range(k - len(coefficients)):
        members = [i for i, one in enumerate(pools) if one == pool]
        share = energy[members] / energy[members].sum()
        centre = tuple(int(c) for c in np.floor(share @ np.array([cells[i] for i in members]) + 0.5))
        found.append((cells.index(centre), share @ x[members]))
    found.sort(key=lambda one: one[0])
    return np.array([token for _, token in found]), [cell for cell, _ in found]


@pytest.mark.parametrize(
    ("grid", "k"),
    [((1, 8, 8), 11), ((1, 8, 8), 4), ((1, 5, 7), 9), ((1, 6, 4), 23), ((1, 1, 9), 5), ((1, 7, 1), 2), ((4, 4, 4), 4), ((3, 5, 4), 21)],
)
def test_tokens_are_those_of_the_slow_reference(tokens_of: Tokens, grid: tuple[int, int, int], k: int) -> None:
    source = tokens_of(grid, seed=k)
    (result,) = Braco()([source], [Budget(k)])
    tokens, cells = coded(source, k)
    assert result.tokens.positions.tolist() == source.positions[cells].tolist()
    torch.testing.assert_close(result.tokens.features.double(), torch.from_numpy(tokens), atol=1e-4, rtol=1e-4)
    assert result.tokens.weight.tolist() == pytest.approx([float(source.weight.sum()) / k] * k)


def rotated(seed: int, shape: tuple[int, ...], width: int = 12) -> Trained:
    """Untrained but for a random rotation of one box."""
    k = math.prod(shape)
    skew = {shape: 0.3 * torch.randn(k, k, generator=torch.Generator().manual_seed(seed))}
    none = untrained(width, 0, CPU)
    return Trained(0, none.embedding, skew, none.score, none.down, none.up, none.bias)


@pytest.mark.parametrize("basis", ["dct", "haar"])
def test_all_coefficients_and_any_rotation_give_the_tokens_back(tokens_of: Tokens, basis: str) -> None:
    grid = (1, 4, 8) if basis == "haar" else (1, 5, 7)
    n = math.prod(grid)
    x, method, set_ = tokens_of(grid).features[None], Braco(basis=basis), rotated(3, grid)
    tokens = method.code(x, grid, n, set_).tokens[0]
    plan = layout(method.basis, "none", grid, n, 0, CPU, local=True, boxed=True)
    q = cayley(set_.skew[grid]) @ plan.start
    torch.testing.assert_close(q @ q.T, torch.eye(n), atol=1e-5, rtol=0)
    torch.testing.assert_close(plan.basis.synthesis @ (q.T @ tokens), x[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("grid", "k"), [((1, 6, 9), 10), ((3, 4, 5), 17)])
def test_dropped_energy_is_the_squared_error_and_falls_with_more_coefficients(
    tokens_of: Tokens, grid: tuple[int, int, int], k: int
) -> None:
    """Parseval, with dropped coefficients summed by their definition."""
    source, n = tokens_of(grid), math.prod(grid)
    x, cells = source.features.double(), list(np.ndindex(*grid))
    method, set_ = Braco(residual=False), untrained(12, 0, CPU)
    dropped = low(grid, n)[k:].tolist()
    waves = [[math.prod(cosine(u, j, m) for u, j, m in zip(place, cell, grid, strict=True)) for cell in cells] for place in dropped]
    energy = (torch.tensor(waves, dtype=torch.float64) @ x).square().sum()
    missed = [float(method.code(source.features[None], grid, count, set_).missed.sum()) for count in range(1, n, 3)]
    assert float(method.code(source.features[None], grid, k, set_).missed.sum()) == pytest.approx(float(energy), rel=1e-4)
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(missed))


def test_every_rotation_keeps_the_same_subspace_and_the_same_error(tokens_of: Tokens) -> None:
    x, grid = tokens_of((1, 8, 8)).features[None], (1, 8, 8)
    plain, turned = (Braco().code(x, grid, 4, set_) for set_ in (untrained(12, 0, CPU), rotated(5, (1, 2, 2))))
    assert not torch.allclose(plain.tokens, turned.tokens, atol=0.1)
    assert torch.equal(plain.missed, turned.missed)
    torch.testing.assert_close(torch.linalg.vector_norm(plain.tokens), torch.linalg.vector_norm(turned.tokens))
    # the same space is spanned: one set of tokens is an orthogonal mix of the other
    mix = turned.tokens[0] @ torch.linalg.pinv(plain.tokens[0])
    torch.testing.assert_close(mix @ mix.T, torch.eye(4), atol=1e-4, rtol=0)


@pytest.mark.parametrize("basis", ["dct", "haar"])
@pytest.mark.parametrize("grid", [(1, 5, 7), (3, 4, 6)])
def test_a_plain_input_has_one_coefficient_and_tokens_like_its_own(tokens_of: Tokens, basis: str, grid: tuple[int, int, int]) -> None:
    plain = tokens_of(grid, features=torch.arange(1.0, 13.0).expand(math.prod(grid), 12))
    coefficients = Braco(basis=basis, local=False, residual=False).code(plain.features[None], grid, 6, untrained(12, 0, CPU)).tokens[0]
    assert int((coefficients.abs().amax(dim=1) > 1e-4).sum()) == 1
    for k in (4, 11):
        (result,) = Braco(basis=basis)([plain], [Budget(k)])
        torch.testing.assert_close(result.tokens.features, plain.features[:k], atol=1e-4, rtol=1e-4)


def test_basis_tokens_are_linear(tokens_of: Tokens) -> None:
    a, b = (tokens_of((1, 6, 6), seed).features[None] for seed in (1, 2))
    code, set_ = Braco(residual=False).code, untrained(12, 0, CPU)
    mixed = code(2 * a - 3 * b, (1, 6, 6), 9, set_).tokens
    torch.testing.assert_close(mixed, 2 * code(a, (1, 6, 6), 9, set_).tokens - 3 * code(b, (1, 6, 6), 9, set_).tokens, atol=1e-4, rtol=1e-4)


def test_an_embedding_hangs_on_the_coefficient_alone(tokens_of: Tokens) -> None:
    grid, none = (1, 8, 8), untrained(12, 0, CPU)
    table = torch.randn(1, 2, 1, 12, generator=torch.Generator().manual_seed(0))
    set_ = Trained(0, table, {}, none.score, none.down, none.up, none.bias)
    moved = [
        Braco().code(x, grid, 4, set_).tokens - Braco().code(x, grid, 4, none).tokens
        for x in (tokens_of(grid, seed).features[None] for seed in (1, 2))
    ]
    torch.testing.assert_close(moved[0], moved[1], atol=1e-5, rtol=0)
    # coefficients (0, 0) and (1, 0) of the table in the coordinates of the 2 x 2 picture; (0, 1) and (1, 1) are beyond it
    columns = torch.tensor([[cosine(u, y, 2) * cosine(0, x, 2) for u in (0, 1)] for y in (0, 1) for x in (0, 1)])
    torch.testing.assert_close(moved[0][0], columns @ table[0, :, 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pools", [1, 3])
def test_scoring_vectors_and_a_map_make_residual_tokens(tokens_of: Tokens, pools: int) -> None:
    """One residual token beside the mean, of a picture of four cells: pooled in one way, and in three."""
    source = tokens_of((1, 2, 2))
    g = torch.Generator().manual_seed(4)
    score, down, up, bias = (torch.randn(shape, generator=g) for shape in ((pools, 12), (pools, 12, 3), (pools, 3, 12), (12,)))
    set_ = Trained(1, torch.zeros(1, 1, 1, 12), {}, score, down, up, bias)
    found = Braco().code(source.features[None], (1, 2, 2), 2, set_)
    x = source.features.double()
    energy = (x - x.mean(dim=0)).square().sum(dim=1)
    weights = [energy * (x @ one.double()).exp() for one in score]
    pooled = [(one / one.sum()) @ x for one in weights]
    expected = pooled[0] + sum(one @ d @ u for one, d, u in zip(pooled, down.double(), up.double(), strict=True)) + bias.double()
    centre = (weights[0] / weights[0].sum()) @ source.positions.double()
    at = [i for i in range(2) if not torch.allclose(found.tokens[0, i].double(), x.mean(dim=0), atol=1e-4)]
    assert len(at) == 1
    torch.testing.assert_close(found.tokens[0, at[0]].double(), expected, atol=1e-4, rtol=1e-4)
    assert source.positions[int(found.cells[0, at[0]])].tolist() == (centre + 0.5).floor().tolist()


def test_frames_by_themselves_are_pictures_by_themselves(tokens_of: Tokens) -> None:
    clip = tokens_of((3, 4, 5), seed=2)
    (result,) = Braco(span="frame")([clip], [Budget(20)])
    start = 0
    for t, count in enumerate((6, 7, 7)):
        frame = tokens_of((1, 4, 5), features=clip.features[t * 20 : (t + 1) * 20])
        (alone,) = Braco()([frame], [Budget(count)])
        torch.testing.assert_close(result.tokens.features[start : start + count], alone.tokens.features)
        assert torch.equal(result.tokens.positions[start : start + count, 1:], alone.tokens.positions[:, 1:])
        assert (result.tokens.positions[start : start + count, 0] == t).all()
        start += count
    with pytest.raises(BudgetError, match=r"^item 2 \(index 1\): each of 3 frames"):
        Braco(span="frame")([tokens_of((1, 4, 5)), clip], [Budget(2), Budget(2)])


def test_the_lowest_frequencies_that_fill_no_box_stay_coefficients(tokens_of: Tokens) -> None:
    """Seven of a square: six lowest and one of two equals; no box of seven is low, so that Q is the identity."""
    source = tokens_of((1, 6, 6))
    (plain,) = Braco(residual=False)([source], [Budget(7)])
    (same,) = Braco(residual=False, local=False)([source], [Budget(7)])
    assert torch.equal(plain.tokens.features, same.tokens.features)
    assert not torch.equal(*(Braco(residual=False, local=local)([source], [Budget(4)])[0].tokens.features for local in (True, False)))


def test_cost_is_that_of_a_few_products(tokens_of: Tokens) -> None:
    def operations(side: int, k: int) -> int:
        x = torch.zeros(1, side * side, 12)
        with FlopCounterMode(display=False) as counter:
            Braco().code(x, (1, side, side), k, untrained(12, 0, CPU))
        return counter.get_total_flops()

    for side, k in ((16, 11), (32, 11), (32, 44)):
        assert operations(side, k) <= 2 * 2 * side * side * (k + 2) * (12 + 3) + 2 * k * k * 12


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_features_that_are_no_numbers_end_no_batch(tokens_of: Tokens, value: float) -> None:
    good, bad = tokens_of((1, 5, 4), seed=1), tokens_of((1, 5, 4), seed=2)
    features = bad.features.clone()
    features[7] = value
    among, broken = Braco()([good, dataclasses.replace(bad, features=features)], [Budget(9)] * 2)
    (alone,) = Braco()([good], [Budget(9)])
    assert torch.equal(among.tokens.features, alone.tokens.features) and torch.equal(among.audit.assignment, alone.audit.assignment)
    assert broken.audit.assignment.unique().tolist() == list(range(9))


def test_where_an_earlier_step_dropped_tokens_the_one_before_stands_for_them(tokens_of: Tokens) -> None:
    kept = torch.tensor([0, 3, 4, 7, 8, 9, 12, 14])
    thinned = tokens_of((1, 4, 4), seed=1, kept=kept)
    (result,) = Braco()([thinned], [Budget(4)])
    latest = [max(i for i, cell in enumerate(kept.tolist()) if cell <= at) for at in range(16)]
    tokens, _ = coded(tokens_of((1, 4, 4), features=thinned.features[latest]), 4)
    torch.testing.assert_close(result.tokens.features.double(), torch.from_numpy(tokens), atol=1e-4, rtol=1e-4)


@pytest.fixture
def coder(tmp_path: Path) -> str:
    """A coder for 4 tokens of an image, 12 wide, with directions of 4 x 4 cells."""
    g = torch.Generator().manual_seed(0)
    parts = {"embedding": (1, 2, 2, 12), "skew.1x2x2": (4, 4), "score": (12,), "down": (12, 3), "up": (3, 12), "bias": (12,)}
    tensors = {f"image.4.{name}": torch.randn(shape, generator=g).half() for name, shape in parts.items()}
    cells = torch.randn(16, 400, generator=g) * torch.linspace(3, 0.1, 16)[torch.randperm(16, generator=g)][:, None]
    tensors["calibration.1x4x4"] = torch.linalg.eigh(cells @ cells.T).eigenvectors.flip(1)[:, :12].T.half().contiguous()
    path = tmp_path / "braco.safetensors"
    save_file(tensors, path, metadata={"basis": "dct", "residual": '{"image.4": 0}'})
    return str(path)


def test_a_trained_coder_serves_its_budgets_and_says_which(tokens_of: Tokens, coder: str) -> None:
    source = tokens_of((1, 4, 4))
    (result,) = Braco(coder=coder)([source], [Budget(4)])
    expected = Braco().code(source.features[None], (1, 4, 4), 4, read_coder(coder, CPU).sets["image", 4])
    assert torch.equal(result.tokens.features, expected.tokens[0])
    with pytest.raises(BudgetError, match=r"^item 2 \(index 1\): .*trained for 4 tokens of an image, not for 5 tokens of this image"):
        Braco(coder=coder)([source, source], [Budget(4), Budget(5)])
    with pytest.raises(BudgetError, match="not for 4 tokens of this clip"):
        Braco(coder=coder)([tokens_of((2, 4, 4))], [Budget(4)])
    with pytest.raises(InputError, match="12 wide, these are 8 wide"):
        Braco(coder=coder)([tokens_of((1, 4, 4), width=8)], [Budget(4)])
    assert torch.equal(Braco(coder=coder)([source], [Budget(16)])[0].tokens.features, source.features)


def test_knobs_that_exclude_each_other_or_name_nothing(coder: str) -> None:
    with pytest.raises(PluginError, match="no trained coder 'nobody'"):
        Braco(coder="nobody")
    with pytest.raises(PluginError, match="no trained coder"):
        Braco(basis="pca", calibration="nobody")
    with pytest.raises(PluginError, match="no trained coder '/nowhere'"):
        Braco(coder="/nowhere")
    with pytest.raises(PluginError, match="leave those knobs out"):
        Braco(coder=coder, residual=False)
    with pytest.raises(PluginError, match="trained on the basis 'dct', not 'haar'"):
        Braco(coder=coder, basis="haar")


def test_principal_directions_keep_the_most_of_what_they_were_calibrated_on(tokens_of: Tokens, coder: str) -> None:
    directions = read_coder(coder, CPU).calibration[1, 4, 4]
    torch.testing.assert_close(directions @ directions.T, torch.eye(12), atol=1e-5, rtol=0)
    # tokens in the span of the first three directions are kept whole by them
    source = tokens_of((1, 4, 4), features=directions[:3].T @ torch.randn(3, 12, generator=torch.Generator().manual_seed(2)))
    missed = Braco(basis="pca", residual=False, calibration=coder).code(source.features[None], (1, 4, 4), 3, untrained(12, 0, CPU)).missed
    assert float(missed.sum()) < 1e-6
    (result,) = Braco(basis="pca", calibration=coder)([source], [Budget(5)])
    assert len(result.tokens) == 5
    with pytest.raises(InputError, match="not of a grid"):
        Braco(basis="pca", calibration=coder)([tokens_of((1, 3, 3))], [Budget(2)])
    with pytest.raises(BudgetError, match="13 tokens are more than the 12"):
        Braco(basis="pca", calibration=coder)([source], [Budget(13)])


def test_measures_of_a_coder(tokens_of: Tokens) -> None:
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert compressibility(x, x) == 1.0 and compressibility(x, torch.zeros(2, 2)) == 0.0
    assert compressibility(x, torch.tensor([[3.0, 0.0], [0.0, 0.0]])) == pytest.approx(9 / 25)
    told = learnability(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 4.0]]), x)
    assert told.dispersion == pytest.approx(4.0) and told.alignment == pytest.approx((0.6 + 0.8 + 0.8) / 3)


def test_the_coder_that_ships_serves_mini_and_names_its_budget(tokens_of: Tokens) -> None:
    source = tokens_of((1, 16, 16), width=576)
    (plain,), (taught,) = (Braco(coder=name)([source], [Budget(11)]) for name in ("none", "mini"))
    assert len(taught.tokens) == 11 and not torch.allclose(plain.tokens.features, taught.tokens.features)
    with pytest.raises(BudgetError, match="'mini' of braco was trained for .*11 tokens of an image.*, not for 12 tokens of this image"):
        Braco(coder="mini")([source], [Budget(12)])
    assert len(Braco(basis="pca")([source], [Budget(11)])[0].tokens) == 11
    clip = tokens_of((8, 8, 8), width=576)
    (plain,), (taught,) = (Braco(coder=name)([clip], [Budget(4)]) for name in ("none", "mini"))
    assert len(taught.tokens) == 4 and not torch.allclose(plain.tokens.features, taught.tokens.features)
