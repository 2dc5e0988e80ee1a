"""Merged entries and joined memories against attention to the tokens themselves."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.kv.merging import Means, coarser, joined, merged, over, scores, together


def attended(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(query.shape[1] // keys.shape[1], 1) for x in (keys, values))
    return F.scaled_dot_product_attention(query[:, :, None], k, v, seen[:, None, None])[:, :, 0]


def of(keys: Tensor, values: Tensor, valid: Tensor) -> Means:
    """Tokens at positions 0, 1, 2, ... but for those that are none."""
    places = torch.arange(valid[0].numel()).view(1, *valid.shape[1:]).expand_as(valid)
    return merged(keys, values, places.masked_fill(~valid, -1))


def blocks(seed: int = 0, b: int = 2, n: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(b, 2, n, 4, 8, generator=generator) for _ in range(2))
    valid = torch.rand(b, n, 4, generator=generator) < 0.7
    valid[:, 1] = True
    return torch.randn(b, 6, 8, generator=generator), keys, values, valid


def test_blocks_of_equal_tokens_lose_nothing() -> None:
    query, keys, values, valid = blocks()
    keys, values = (x[:, :, :, :1].expand_as(x).contiguous() for x in (keys, values))
    valid[0, 2] = False
    entries = of(keys, values, valid)
    out, _ = over(query, entries.values, scores(query, entries))
    torch.testing.assert_close(out, attended(query, keys.flatten(2, 3), values.flatten(2, 3), valid.flatten(1)))


def test_the_score_of_an_entry_is_never_above_what_its_tokens_weigh() -> None:
    query, keys, values, valid = blocks()
    found = scores(query, of(keys, values, valid))
    each = torch.einsum("bgrd,bgnmd->bgrnm", query.unflatten(1, (2, 3)), keys) * 8**-0.5
    true = each.masked_fill(~valid[:, None, None], -torch.inf).logsumexp(-1)
    assert (found <= true + 1e-5).all() and not torch.allclose(found, true)


def test_merging_twice_is_merging_once() -> None:
    _, keys, values, valid = blocks(n=4)
    twice = coarser(of(keys, values, valid), 2)
    once = of(*(x.flatten(2, 3).unflatten(2, (2, 8)) for x in (keys, values)), valid.flatten(1).unflatten(1, (2, 8)))
    for ours, true in ((twice.keys, once.keys), (twice.values, once.values), (twice.sizes, once.sizes), (twice.positions, once.positions)):
        torch.testing.assert_close(ours, true)


def test_parts_joined_are_attention_to_all_of_them() -> None:
    query, keys, values, valid = blocks()
    k, v, seen = keys.flatten(2, 3), values.flatten(2, 3), valid.flatten(1)
    each = (torch.einsum("bgrd,bgtd->bgrt", query.unflatten(1, (2, 3)), k) * 8**-0.5).masked_fill(~seen[:, None, None], -torch.inf)
    parts = [over(query, v[:, :, part], each[..., part]) for part in (slice(0, 5), slice(5, 5), slice(5, 12))]
    torch.testing.assert_close(joined(parts), attended(query, k, v, seen))


def test_ka_08_what_sees_nothing_is_zero_and_changes_nothing() -> None:
    query, _, values, _ = blocks()
    nothing = over(query, values[:, :, 0], torch.full((2, 2, 3, 4), -torch.inf))
    assert (nothing[0] == 0).all() and (nothing[1] == -torch.inf).all()
    assert (joined([nothing, nothing]) == 0).all()
    some = over(query, values[:, :, 0], torch.zeros(2, 2, 3, 4))
    torch.testing.assert_close(joined([nothing, some]), some[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_entries_keep_the_dtype_and_know_their_bytes(dtype: torch.dtype) -> None:
    _, keys, values, valid = blocks()
    entries = of(keys.to(dtype), values.to(dtype), valid)
    assert entries.keys.dtype == entries.values.dtype == dtype
    assert entries.nbytes == 2 * 2 * 2 * 3 * 8 * dtype.itemsize + 2 * 6 * 8
    assert together([entries.part(0, 2), entries.part(2, 3)]).keys.equal(entries.keys)
