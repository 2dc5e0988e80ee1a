"""Methods that choose by a map between means of blocks: each against a loop over its rows, written from the rule."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.layout import tiles, window
from mmsdk.diffusion.attention.methods.draft import Draft
from mmsdk.diffusion.attention.methods.nabla import Nabla
from mmsdk.diffusion.attention.methods.sparge import Sparge
from mmsdk.diffusion.attention.methods.vsa import Vsa
from mmsdk.diffusion.attention.methods.xattention import Xattention
from mmsdk.diffusion.attention.types import Grid, Place, Selection, Selector
from mmsdk.errors import InputError

Seen = Callable[[Selection], Tensor]
CPU = torch.device("cpu")
GRID = Grid(5, 17, 21)


def given(grid: Grid, h: int = 2, d: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [2 * torch.randn(1, h, grid.tokens, d, generator=draw) for _ in range(3)]


def chosen(method: Selector, tensors: list[Tensor], grid: Grid) -> Selection:
    choice = method(*tensors, Place(grid))
    assert isinstance(choice, Selection)
    return choice


def means(x: Tensor, tokens: list[list[int]]) -> Tensor:
    return torch.stack([x[part].double().mean(0) for part in tokens])


def tokens_of_tiles(grid: Grid, shape: tuple[int, int, int]) -> list[list[int]]:
    """The tokens of each tile, in raster order of the tiles."""
    counts = [-(-side // step) for side, step in zip((grid.frames, grid.height, grid.width), shape, strict=True)]
    found: list[list[int]] = [[] for _ in range(math.prod(counts))]
    for token, place in enumerate(itertools.product(range(grid.frames), range(grid.height), range(grid.width))):
        i, j, k = (at // step for at, step in zip(place, shape, strict=True))
        found[(i * counts[1] + j) * counts[2] + k].append(token)
    return found


def softmax_map(query: Tensor, keys: Tensor, tokens: list[list[int]]) -> Tensor:
    return (means(query, tokens) @ means(keys, tokens).T / query.shape[1] ** 0.5).softmax(-1)


@pytest.mark.parametrize("mass", [0.5, 0.9])
def test_nabla_keeps_the_mass_and_the_window(mass: float) -> None:
    query, keys, values = given(GRID)
    choice = chosen(Nabla(mass), [query, keys, values], GRID)
    near = window((5, 3, 3), (3, 3, 3), False, CPU)
    for head in range(2):
        shares = softmax_map(query[0, head], keys[0, head], tokens_of_tiles(GRID, (1, 8, 8)))
        for row, mask in enumerate(choice.mask[0, head]):
            ascending = sorted(range(45), key=lambda j: shares[row, j].item())
            total, kept = 0.0, set[int]()
            for j in ascending:
                total += shares[row, j].item()
                kept |= {j} if total >= 1 - mass else set()
            assert set(mask.nonzero().flatten().tolist()) == kept | set(near[row].nonzero().flatten().tolist())
            assert shares[row, mask].sum() >= mass - 1e-6


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_draft_keeps_the_largest_entries_of_a_heads_whole_map_and_the_diagonal(sparsity: float) -> None:
    query, keys, values = given(GRID)
    choice = chosen(Draft(sparsity), [query, keys, values], GRID)
    tokens = tokens_of_tiles(GRID, (1, 8, 16))
    for head in range(2):
        shares = softmax_map(query[0, head], keys[0, head], tokens)
        count = math.ceil(round((1 - sparsity) * len(tokens) ** 2, 6))
        bar = sorted(shares.flatten().tolist(), reverse=True)[count - 1]
        assert torch.equal(choice.mask[0, head], (shares >= bar) | torch.eye(len(tokens), dtype=torch.bool))


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 8, 8)])
def test_vsa_reads_the_best_tiles_and_adds_the_gated_coarse_branch(
    shape: tuple[int, int, int], seen: Callable[[Selection], Tensor]
) -> None:
    query, keys, values = given(GRID)
    gate = torch.rand(query.shape, generator=torch.Generator().manual_seed(5))
    tokens = tokens_of_tiles(GRID, shape)
    method = Vsa(0.7, *shape)
    choice = method(query, keys, values, Place(GRID, gate=gate))
    assert isinstance(choice, Selection)
    count = math.ceil(3 * len(tokens) / 10)
    coarse, read = torch.zeros(query.shape, dtype=torch.float64), torch.zeros(1, 2, GRID.tokens, GRID.tokens, dtype=torch.bool)
    for head in range(2):
        shares = softmax_map(query[0, head], keys[0, head], tokens)
        mixed = shares @ means(values[0, head], tokens)
        for row, part in enumerate(tokens):
            coarse[0, head, part] = mixed[row]
            for j in sorted(range(len(tokens)), key=lambda j: -shares[row, j].item())[:count]:
                read[0, head][torch.tensor(part)[:, None], torch.tensor(tokens[j])] = True
    assert torch.equal(seen(choice), read)
    weights = (query.double() @ keys.double().transpose(2, 3) / 4).masked_fill(~read, -torch.inf).softmax(-1)
    out = attend(query, keys, values, choice).double()
    torch.testing.assert_close(out, coarse * gate + weights @ values.double(), rtol=1e-5, atol=1e-5)
    plain = method(query, keys, values, Place(GRID))
    assert isinstance(plain, Selection) and plain.residual is None and torch.equal(plain.mask, choice.mask)


def slow_sparge(query: Tensor, keys: Tensor, method: Sparge, similarity: float) -> Tensor:
    """One head, block by block; cosines of all pairs."""
    keys = keys - keys.mean(0)
    rows, columns = query.double().split(method.query_block), keys.double().split(method.key_block)

    def unsure(block: Tensor) -> bool:
        unit = F.normalize(block, dim=-1)
        return bool((unit @ unit.T).mean() <= similarity)

    weak = [unsure(block) for block in columns]
    mask = torch.zeros(len(rows), len(columns), dtype=torch.bool)
    for i, block in enumerate(rows):
        scores = torch.tensor([float(block.mean(0) @ other.mean(0)) / query.shape[1] ** 0.5 for other in columns])
        shares = scores.masked_fill(torch.tensor(weak), -torch.inf).softmax(0).nan_to_num(0)
        ranked = sorted(range(len(columns)), key=lambda j: -shares[j].item())
        sums = list(itertools.accumulate(shares[j].item() for j in ranked))
        limit = max(1, int(method.topk * len(columns))) if method.rule == "topk" else max(1, sum(total <= method.cdf for total in sums))
        mask[i, ranked[:limit]] = True
        mask[i] |= torch.tensor(weak) | unsure(block)
    return mask


@pytest.mark.parametrize(
    ("method", "similarity"),
    [(Sparge(), -0.1), (Sparge("cdf"), 0.6), (Sparge("cdf", cdf=0.7, similarity=0.05), 0.05), (Sparge(topk=0.2, similarity=0.04), 0.04)],
    ids=str,
)
def test_sparge_reads_by_means_where_blocks_are_alike_and_all_where_not(method: Sparge, similarity: float) -> None:
    """Tokens drift slowly, so that neighbours are alike; in one head they are noise."""
    query, keys, values = given(GRID)
    query[0, 0], keys[0, 0] = (x[0, 0].cumsum(0) / 30 + x[0, 0] / 4 for x in (query, keys))
    choice = chosen(method, [query, keys, values], GRID)
    for head in range(2):
        assert torch.equal(choice.mask[0, head], slow_sparge(query[0, head], keys[0, head], method, similarity))


def test_sparge_is_not_moved_by_what_all_keys_have_in_common() -> None:
    query, keys, values = given(GRID)
    one = chosen(Sparge("cdf", cdf=0.5, similarity=0.03), [query, keys, values], GRID)
    other = chosen(Sparge("cdf", cdf=0.5, similarity=0.03), [query, keys + 3, values], GRID)
    assert (one.mask == other.mask).double().mean() > 0.999


def slow_xattention(query: Tensor, keys: Tensor, stride: int, threshold: float) -> Tensor:
    """One head: sums over antidiagonals score by score, zeros where tokens are missing."""
    n, d = query.shape
    scores = F.pad(query.double() @ keys.double().T, (0, -n % 128, 0, -n % 128))
    wide = len(scores) // stride
    sums = torch.zeros(wide, wide, dtype=torch.float64)
    for a in range(stride):
        sums += scores[stride - 1 - a :: stride, a::stride]
    groups = -(-n // stride)
    shares = (sums / (d**0.5 * stride))[:groups, :groups].softmax(-1)
    per = 128 // stride
    blocks = -(-n // 128)
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    for i in range(blocks):
        weights = torch.stack([shares[i * per : (i + 1) * per, j * per : (j + 1) * per].sum() for j in range(blocks)])
        total = 0.0
        for j in sorted(range(blocks), key=lambda j: -weights[j].item()):
            if total >= threshold * weights.sum():
                break
            mask[i, j] = True
            total += weights[j].item()
    return mask


@pytest.mark.parametrize(
    ("stride", "threshold", "grid"), [(8, 0.9, GRID), (16, 0.5, GRID), (8, 0.3, Grid(2, 9, 7)), (16, 0.7, Grid(8, 16, 8))]
)
def test_xattention_keeps_the_antidiagonals_mass(stride: int, threshold: float, grid: Grid) -> None:
    query, keys, values = given(grid)
    whole = chosen(Xattention(stride, threshold), [query, keys, values], grid)
    parts = chosen(Xattention(stride, threshold, chunk=256), [query, keys, values], grid)
    assert torch.equal(whole.mask, parts.mask)
    for head in range(2):
        assert torch.equal(whole.mask[0, head], slow_xattention(query[0, head], keys[0, head], stride, threshold))


def test_xattention_refuses_a_stride_that_does_not_divide_a_block() -> None:
    with pytest.raises(InputError, match="a stride of 12"):
        chosen(Xattention(12), given(GRID), GRID)


@pytest.mark.parametrize(
    ("less", "more"),
    [
        (Nabla(0.3), Nabla(0.8)),
        (Draft(0.95), Draft(0.6)),
        (Vsa(0.9), Vsa(0.5)),
        (Sparge(topk=0.2), Sparge(topk=0.6)),
        (Sparge("cdf", cdf=0.4, similarity=-1.0), Sparge("cdf", cdf=0.9, similarity=-1.0)),
        (Xattention(threshold=0.3), Xattention(threshold=0.8)),
    ],
    ids=str,
)
def test_a_higher_threshold_keeps_what_a_lower_one_kept(less: Selector, more: Selector) -> None:
    few, many = (chosen(method, given(GRID), GRID).mask for method in (less, more))
    assert not (few & ~many).any() and many.sum() > few.sum()


@pytest.mark.parametrize("method", [Nabla(1.0), Draft(0.0), Vsa(0.0), Sparge(topk=1.0), Xattention(threshold=1.0)], ids=str)
def test_keeping_all_is_dense_attention(method: Selector) -> None:
    query, keys, values = given(GRID)
    out = attend(query, keys, values, chosen(method, [query, keys, values], GRID))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, keys, values), rtol=1e-5, atol=1e-5)


def test_tiles_of_the_slow_reference_are_those_of_the_layout() -> None:
    order = tiles(GRID, (4, 4, 4), 64, CPU).blocks.order
    assert order is not None and order[0, 0].tolist() == list(itertools.chain.from_iterable(tokens_of_tiles(GRID, (4, 4, 4))))
