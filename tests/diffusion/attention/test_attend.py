"""Attention over chosen blocks on the processor: against dense attention with the expanded mask, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.diffusion.attention.attend import attend
from mmsdk.diffusion.attention.types import Blocks, Everything, Selection
from mmsdk.errors import InputError
from mmsdk.kernels.case import TOLERANCE
from mmsdk.kernels.cpu import blocks as native
from mmsdk.kernels.cpu.library import library


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(*shape: int, share: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def dense(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """With the mask of all pairs; 0 where a query sees nothing."""
    k, v = (x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (keys, values))
    weights = (query.double() @ k.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return weights.nan_to_num(0) @ v


Seen = Callable[[Selection], Tensor]


@pytest.fixture(autouse=True, params=["c++", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever does the arithmetic."""
    if request.param == "torch":
        monkeypatch.setattr(native, "here", lambda *_: False)
    elif library().functions is None:
        pytest.skip(library().state)


def near(ours: Tensor, truth: Tensor, dtype: torch.dtype = torch.float32) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours.double(), truth.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ka_01_200_random_masks_equal_dense_attention_with_the_expanded_mask(dtype: torch.dtype) -> None:
    """1 to 5 blocks of 64 or 128 on either side, ragged or not; rows of the mask may be empty. 50 of them in half precision."""
    draw = torch.Generator().manual_seed(1)
    for number in range(200 if dtype == torch.float32 else 50):
        rows, columns = (int(n) for n in torch.randint(1, 6, (2,), generator=draw))
        sizes = [(64, 128)[int(n)] for n in torch.randint(0, 2, (2,), generator=draw)]
        s, t = (
            size * count - int(torch.randint(0, size, (1,), generator=draw)) for size, count in zip(sizes, (rows, columns), strict=True)
        )
        query, keys, values = (torch.randn(1, 2, n, 16, generator=draw).to(dtype) for n in (s, t, t))
        mask = torch.rand(1, 2, rows, columns, generator=draw) < (number % 5 + 1) / 6
        choice = Selection(mask, Blocks(sizes[0], s), Blocks(sizes[1], t))
        wide = mask.repeat_interleave(sizes[0], 2)[:, :, :s].repeat_interleave(sizes[1], 3)[..., :t]
        near(attend(query, keys, values, choice), dense(query, keys, values, wide), dtype)


@pytest.mark.parametrize("length", [1, 63, 127, 129, 200])
@pytest.mark.parametrize("size", [64, 128])
def test_ka_02_odd_lengths_are_right_and_so_are_their_gradients(length: int, size: int, seen: Seen) -> None:
    query, keys, values = (normal(1, 2, length, 8, seed=n).requires_grad_() for n in range(3))
    count = -(-length // size)
    mask = drawn(1, 2, count, count) | torch.eye(count, dtype=torch.bool)
    choice = Selection(mask, Blocks(size, length), Blocks(size, length))
    out = attend(query, keys, values, choice)
    truth = dense(query, keys, values, seen(choice))
    near(out, truth)
    ours = torch.autograd.grad(out.square().sum(), (query, keys, values))
    theirs = torch.autograd.grad(truth.square().sum(), (query, keys, values))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_ka_03_a_choice_made_for_another_length_is_refused() -> None:
    choice = Selection(drawn(1, 2, 16, 16), Blocks(64, 1024), Blocks(64, 1024))
    query, keys = normal(1, 2, 1024, 8), normal(1, 2, 1000, 8)
    with pytest.raises(InputError, match="made for 1024 queries and 1024 keys; there are 1024 and 1000"):
        attend(query, keys, keys, choice)
    with pytest.raises(InputError, match=r"its mask is \[1, 2, 16, 16\]; rows, heads and blocks make it \[1, 2, 16, 17\]"):
        attend(query, normal(1, 2, 1025, 8), normal(1, 2, 1025, 8), Selection(choice.mask, Blocks(64, 1024), Blocks(64, 1025)))


def test_ka_06_parts_of_the_queries_over_unpadded_keys_equal_the_whole() -> None:
    """1001 tokens in 8 parts of 126: blocks of a part are cut where it ends, and nobody reads the 7 that fill up."""
    query, keys, values = (normal(1, 1, 1001, 8, seed=n) for n in range(3))
    bounds = sorted({*range(0, 1001, 64), *range(0, 1001, 126), 1001})
    starts = torch.tensor(bounds)[None, None]
    mask = drawn(1, 1, len(bounds) - 1, 16, seed=5)
    whole = attend(query, keys, values, Selection(mask, Blocks(64, 1001, starts), Blocks(64, 1001)))
    padded = F.pad(query, (0, 0, 0, 7))
    for part in range(8):
        low, high = 126 * part, min(126 * part + 126, 1001)
        rows = [i for i, bound in enumerate(bounds[:-1]) if low <= bound < high]
        own = (starts[..., rows[0] : rows[-1] + 2] - low).clone()
        out = attend(
            padded[:, :, low : low + 126][:, :, : high - low], keys, values,
            Selection(mask[:, :, rows], Blocks(64, high - low, own), Blocks(64, 1001)),
        )  # fmt: skip
        torch.testing.assert_close(out, whole[:, :, low:high])


def test_ka_08_rows_that_read_nothing_give_0_and_the_residual_alone() -> None:
    query, keys, values, residual = (normal(1, 2, 100, 8, seed=n) for n in range(4))
    mask = drawn(1, 2, 2, 2)
    mask[:, 0] = False
    plain = attend(query, keys, values, Selection(mask, Blocks(64, 100), Blocks(64, 100)))
    assert not plain[:, 0].any() and not plain.isnan().any()
    out = attend(query, keys, values, Selection(mask, Blocks(64, 100), Blocks(64, 100), residual))
    torch.testing.assert_close(out, plain + residual)
    nothing = attend(query, keys, values, Selection(torch.zeros_like(mask), Blocks(64, 100), Blocks(64, 100)))
    assert not nothing.any()


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 24])
def test_ka_12_query_heads_share_keys_and_values(group: int, seen: Seen) -> None:
    query, keys, values = normal(1, 2 * group, 70, 8), normal(1, 2, 90, 8, seed=1), normal(1, 2, 90, 8, seed=2)
    choice = Selection(drawn(1, 2 * group, 3, 2), Blocks(32, 70), Blocks(64, 90))
    near(attend(query, keys, values, choice), dense(query, keys, values, seen(choice)))


@pytest.mark.parametrize("d", [64, 72, 80, 96, 128, 192, 256, 384])
def test_ka_13_and_ka_14_heads_of_any_width(d: int, seen: Seen) -> None:
    query, keys, values = (normal(1, 1, 100, d, seed=n) for n in range(3))
    choice = Selection(drawn(1, 1, 2, 2, share=0.7), Blocks(64, 100), Blocks(64, 100))
    near(attend(query, keys, values, choice), dense(query, keys, values, seen(choice)))


def test_blocks_between_starts_and_orders_of_each_head(seen: Seen) -> None:
    b, h, s, size = 2, 4, 90, 32
    query, keys, values, residual = (normal(b, h, s, 8, seed=n) for n in range(4))
    draw = torch.Generator().manual_seed(7)
    sides = []
    for _ in range(2):
        starts = torch.randint(0, size, (b, h, 9), generator=draw).cumsum(-1).clamp(max=s)
        starts = torch.cat((torch.zeros(b, h, 1, dtype=torch.int64), starts), -1)
        starts[..., -1] = s
        sides.append(Blocks(size, s, starts, torch.rand(b, h, s, generator=draw).argsort(-1)))
    assert all(int(blocks.sizes(torch.device("cpu")).max()) <= size for blocks in sides)
    choice = Selection(drawn(b, h, 9, 9), *sides, residual)
    near(attend(query, keys, values, choice), dense(query, keys, values, seen(choice)) + residual)


def test_everything_is_dense_attention_and_so_are_all_blocks() -> None:
    query, keys, values = normal(2, 4, 70, 8), normal(2, 2, 70, 8, seed=1), normal(2, 2, 70, 8, seed=2)
    truth = dense(query, keys, values, torch.ones(2, 4, 70, 70, dtype=torch.bool))
    near(attend(query, keys, values, Everything()), truth)
    near(attend(query, keys, values, Selection(torch.ones(2, 4, 2, 2, dtype=torch.bool), Blocks(64, 70), Blocks(64, 70))), truth)


def test_density_counts_pairs_of_tokens() -> None:
    """3 of 4 blocks of 64, of 100 tokens: without the 36 by 36 of the last."""
    mask = torch.tensor([[True, True], [True, False]])[None, None]
    assert Selection(mask, Blocks(64, 100), Blocks(64, 100)).density() == pytest.approx(1 - 36**2 / 100**2)


def test_inputs_are_left_as_they_were() -> None:
    tensors = [normal(1, 2, 100, 8, seed=n) for n in range(3)]
    before = [x.clone() for x in tensors]
    attend(*tensors, Selection(drawn(1, 2, 2, 2), Blocks(64, 100), Blocks(64, 100)))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
