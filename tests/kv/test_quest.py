"""Bounds of pages against every token in them, and which pages are read."""

import torch

from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kv.quest import best, bounds, worth


def pages(tokens: int, width: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = -(-tokens // 4)
    keys = torch.randn(2, 2, count, 4, width, generator=generator)
    valid = (torch.arange(4 * count) < torch.tensor([tokens, tokens - 5])[:, None]).view(2, count, 4)
    return keys.masked_fill(~valid[:, None, ..., None], torch.nan), valid, torch.randn(2, 4, width, generator=generator)


def test_no_token_exceeds_the_bound_of_its_page_and_the_bound_is_the_papers() -> None:
    keys, valid, query = pages(22)
    low, high = bounds(keys, valid)
    found = worth(query, low, high)
    products = torch.einsum("bgrd,bgnmd->bgrnm", query.unflatten(1, (2, 2)), keys.nan_to_num()).masked_fill(
        ~valid[:, None, None], -torch.inf
    )
    assert (products.amax(4).amax(2) <= found + 1e-5)[valid.any(2)[:, None].expand_as(found)].all()
    for row in range(2):
        for head in range(2):
            for page in torch.where(valid[row].any(1))[0].tolist():
                real = keys[row, head, page, valid[row, page]]
                sums = [
                    sum(max(float(q * a), float(q * b)) for q, a, b in zip(one, real.amin(0), real.amax(0), strict=True))
                    for one in query[row, 2 * head : 2 * head + 2]
                ]
                torch.testing.assert_close(found[row, head, page], torch.tensor(max(sums)))


def test_a_page_without_tokens_is_finite_and_never_read() -> None:
    keys, valid, query = pages(5)
    low, high = bounds(keys, valid)
    assert low.isfinite().all() and high.isfinite().all()
    index = best(worth(query, low, high), valid.sum(2), torch.zeros_like(valid[..., 0]), 2)
    assert sorted(index[0, 0].tolist()) == [0, 1] and (index[1] == -1).all()


def test_the_newest_page_is_read_and_the_rest_goes_by_worth() -> None:
    worths = torch.tensor([[[5.0, 1.0, 4.0, -2.0]]])
    newest = torch.tensor([[False, False, False, True]])
    assert sorted(best(worths, torch.ones(1, 4, dtype=torch.long), newest, 3)[0, 0].tolist()) == [0, 2, 3]


def test_all_pages_are_exact_attention() -> None:
    keys, valid, query = pages(22)
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(1))
    index = best(worth(query, *bounds(keys, valid)), valid.sum(2), torch.zeros_like(valid[..., 0]), 6)
    out, _ = block_gather(query, keys, values, index, torch.zeros(index.shape), valid, 0.4)
    k, v = (x.nan_to_num().flatten(2, 3).repeat_interleave(2, 1) for x in (keys, values))
    scores = (torch.einsum("bhd,bhtd->bht", query, k) * 0.4).masked_fill(~valid.flatten(1)[:, None], -torch.inf)
    torch.testing.assert_close(out, torch.einsum("bht,bhtd->bhd", scores.softmax(-1), v))


def test_a_needle_is_found_in_the_pages_of_largest_bound() -> None:
    keys, valid, query = pages(22)
    keys[0, 1, 2, 3] = 6 * query[0, 2] / query[0, 2].norm()
    index = best(worth(query, *bounds(keys, valid)), valid.sum(2), torch.zeros_like(valid[..., 0]), 1)
    assert index[0, 1].tolist() == [2]
