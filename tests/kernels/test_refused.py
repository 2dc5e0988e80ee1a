"""What does not fit an operation is refused by its name, before any kernel runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels.older import Older
from mmsdk.kernels.ops.assign_and_merge import assign_and_merge, nearest_centre
from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kernels.ops.block_sparse import block_sparse, listed
from mmsdk.kernels.ops.block_worth import block_worth
from mmsdk.kernels.ops.dpp_greedy import dpp_greedy
from mmsdk.kernels.ops.drop_twins import drop_twins
from mmsdk.kernels.ops.farthest_point import farthest_point
from mmsdk.kernels.ops.flash_prefill import flash_prefill
from mmsdk.kernels.ops.gemv import gemv_int4, gemv_int8
from mmsdk.kernels.ops.indexer import indexer
from mmsdk.kernels.ops.kv_round import kv_round
from mmsdk.kernels.ops.mla_decode import mla_decode
from mmsdk.kernels.ops.paged_decode import paged_decode
from mmsdk.kernels.ops.pair_similarity import pair_similarity
from mmsdk.kernels.ops.rope import rope
from mmsdk.kernels.ops.small_gemm import small_gemm_int4, small_gemm_int8
from mmsdk.kernels.rounding import Codes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def starts(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def codes(page: int) -> Tensor:
    return torch.zeros(1, 1, page, 1, 8, dtype=torch.uint8)


def read_with(past: Older) -> None:
    paged_decode(normal(1, 1, 8), *(normal(1, 16, 1, 8),) * 2, starts(0)[None], starts(1), 1.0, older=past)


def older(bits: str, page: int) -> Older:
    pools = [Codes(codes(page)[0], *(torch.ones(shape),) * 2) for shape in ((1, 1, 1, 8), (1, page, 1, 1))]
    return Older(bits, *pools, starts(0)[None], starts(1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pair_similarity(normal(1, 2, 8), normal(1, 2, 8).half()), "torch.float32 meet vectors of torch.float16"),
        (lambda: farthest_point(normal(1, 3, 8), starts(0), 4), "4 of 3 tokens"),
        (lambda: farthest_point(normal(1, 3, 8), starts(0), 0), "0 of 3 tokens"),
        (lambda: dpp_greedy(normal(1, 3, 8), 4), "4 of 3 tokens"),
        (lambda: drop_twins(normal(1, 3, 3), 4, 8), "4 of 3 tokens"),
        (lambda: drop_twins(normal(1, 3, 3), 0, 8), "0 of 3 tokens"),
        (lambda: drop_twins(normal(1, 3, 3), 2, 0), "0 tokens at a time"),
        (lambda: nearest_centre(normal(1, 3, 8), normal(1, 2, 8).half()), "torch.float16 meet vectors of torch.float32"),
        (lambda: assign_and_merge(normal(1, 3, 8), normal(1, 0, 8), normal(1, 3, 4)), "there is no centre"),
        (lambda: flash_prefill(normal(1, 5, 8), normal(1, 2, 8), normal(1, 2, 8), starts(0, 1), starts(0, 1), 1, 1.0), "5 query heads"),
        (lambda: flash_prefill(normal(1, 1, 384), normal(1, 1, 384), normal(1, 1, 8), starts(0, 1), starts(0, 1), 1, 1.0), "at most 256"),
        (lambda: flash_prefill(normal(1, 1, 8), normal(1, 1, 8), normal(1, 1, 512), starts(0, 1), starts(0, 1), 1, 1.0), "at most 256"),
        (lambda: paged_decode(normal(1, 5, 8), normal(1, 16, 2, 8), normal(1, 16, 2, 8), starts(0)[None], starts(1), 1.0), "5 query heads"),
        (lambda: paged_decode(normal(1, 1, 384), *(normal(1, 16, 1, 384),) * 2, starts(0)[None], starts(1), 1.0), "at most 256"),
        (lambda: read_with(older("int3", 16)), "as int3; there are fp8, int8, int4, int2, turbo4, turbo2"),
        (lambda: read_with(older("int8", 4)), "blocks of 4 tokens"),
        (lambda: mla_decode(normal(1, 1, 8), normal(1, 16, 8), starts(0)[None], starts(1), 1.0, 9), "9 of 8 channels"),
        (lambda: mla_decode(normal(1, 1, 1088), normal(1, 16, 1088), starts(0)[None], starts(1), 1.0, 1024), "at most 512"),
        (lambda: block_worth(normal(1, 5, 1, 8), normal(1, 2, 3, 8), None, normal(1, 2, 3), 1.0, together=True), "5 query heads"),
        (lambda: indexer(normal(1, 1, 2, 8), normal(1, 1, 2), normal(1, 3, 8), starts(3)[None], 0), "at least 1"),
        (lambda: indexer(normal(1, 1, 2, 384), normal(1, 1, 2), normal(1, 3, 384), starts(3)[None], 2), "at most 256"),
        (lambda: kv_round(normal(1, 1, 4, 1, 8), *(starts(0),) * 2, codes(4), *(normal(1, 1, 4, 1, 8),) * 2, "int8", True), "must be"),
        (lambda: kv_round(normal(1, 1, 4, 1, 8), *(starts(0),) * 2, codes(4), *(normal(1, 1, 4, 1, 1),) * 2, "int3", False), "'int3' is"),
        (lambda: rope(*(normal(1, 1, 1, 8),) * 2, *(normal(1, 1, 1, 4),) * 2, (3,)), "share 4 pairs among 1 tables"),
        (lambda: rope(*(normal(1, 1, 1, 6),) * 2, *(normal(1, 1, 1, 4),) * 2, (4,)), "do not fit"),
        (lambda: gemv_int8(normal(1, 6), normal(2, 6).char(), normal(2, 4)), "4 groups do not share 6"),
        (lambda: gemv_int4(normal(1, 5), normal(2, 3).byte(), normal(2, 1), normal(2, 1)), "rows of 5 numbers"),
        (lambda: gemv_int4(normal(1, 6), normal(2, 3).byte(), normal(2, 2), normal(2, 2)), "2 groups do not share 6"),
        (lambda: small_gemm_int8(normal(3, 6), normal(2, 6).char(), normal(2, 4)), "4 groups do not share 6"),
        (lambda: small_gemm_int4(normal(3, 5), normal(2, 3).byte(), normal(2, 1), normal(2, 1)), "rows of 5 numbers"),
    ],
)  # fmt: skip
def test_ka_14_what_does_not_fit_is_refused_by_name(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (16, 48)}, "blocks of 16 queries and 48 keys; there are 16, 32, 64, 128"),
        ({"query": torch.zeros(1, 2, 40, 16)}, "lists of 4 rows for 40 queries, which make 3"),
        ({"keys": torch.zeros(1, 2, 60, 16)}, "lists of 5 blocks; 60 keys make 4"),
        ({"keys": torch.zeros(1, 3, 70, 16)}, "2 query heads cannot share 3"),
        ({"query": torch.zeros(1, 2, 50, 260), "keys": torch.zeros(1, 2, 70, 260)}, "heads of 260 channels; at most 256"),
    ],
)
def test_ka_03_and_ka_14_lists_of_another_length_and_heads_too_wide_are_refused(change: dict[str, object], message: str) -> None:
    counts, blocks = listed(torch.ones(1, 2, 4, 5, dtype=torch.bool))
    arguments = {"query": normal(1, 2, 50, 16), "keys": normal(1, 2, 70, 16), "values": normal(1, 2, 70, 16)}
    arguments |= {"counts": counts, "blocks": blocks, "sizes": (16, 16), "scale": 1.0}
    changed = {**arguments, **change}
    if "keys" in change:
        changed["values"] = changed["keys"]
    with pytest.raises(InputError, match=message):
        block_sparse(**changed)


@pytest.mark.parametrize("shape", [(3, 2), (4, 0)])
def test_block_gather_refuses_heads_that_cannot_be_shared(shape: tuple[int, int]) -> None:
    h, g = shape
    keys, none = normal(1, g, 8, 8), torch.zeros(1, g, 1)
    with pytest.raises(InputError, match="share"):
        block_gather(normal(1, h, 8), keys, keys, none.long(), none, torch.ones(1, 8) > 0, torch.zeros(1).long(), 4, 1.0)
