"""Attention to latents against keys and values made of them, one head and one query at a time."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention import mla
from mmsdk.attention.mask import Bias, Causal, Everything, Mask
from mmsdk.attention.mla import Latent
from mmsdk.errors import ModelError
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages
from mmsdk.kv.types import LayerView, PagedView

SIZES = Latent(q_rank=0, kv_rank=16, nope=6, rope=4, value=5, sharpness=1.3)
ROWS, HEADS, ENTRIES = 2, 3, 11


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def view_of(entries: Tensor) -> LayerView:
    b, _, t, _ = entries.shape
    positions = torch.arange(t).expand(b, t)
    return LayerView(entries, entries[..., :0], positions, positions >= 0, torch.full((b,), t), True)


def slowly(query: Tensor, up: Tensor, entries: Tensor, seen: Tensor) -> Tensor:
    """Expanded, in float64: for each row, head and query the keys of all entries, a softmax over the seen ones, and the values."""
    w_uk, w_uv = up.double().split((SIZES.nope, SIZES.value), dim=1)
    out = torch.zeros(*query.shape[:3], SIZES.value, dtype=torch.float64)
    for row in range(query.shape[0]):
        latents, turned = entries[row, 0].double().split((SIZES.kv_rank, SIZES.rope), dim=-1)
        for head in range(HEADS):
            keys, values = torch.cat((latents @ w_uk[head].T, turned), dim=-1), latents @ w_uv[head].T
            for place in range(query.shape[2]):
                which = seen[row, place].nonzero()[:, 0]
                if len(which):
                    scores = keys[which] @ query[row, head, place].double() * 1.3 / 10**0.5
                    out[row, head, place] = scores.softmax(0) @ values[which]
    return out


def absorbed(query: Tensor, up: Tensor) -> Tensor:
    w_uk = up[:, : SIZES.nope]
    nope, turned = query.split((SIZES.nope, SIZES.rope), dim=-1)
    return torch.cat((torch.einsum("bhsn,hnr->bhsr", nope, w_uk), turned), dim=-1)


def values(mixed: Tensor, up: Tensor) -> Tensor:
    return torch.einsum("bhsr,hvr->bhsv", mixed, up[:, SIZES.nope :])


CASES = {
    "everything": (1, Everything(), torch.ones(ROWS, 1, ENTRIES, dtype=torch.bool)),
    "causal": (ENTRIES, Causal(), torch.ones(ROWS, ENTRIES, ENTRIES, dtype=torch.bool).tril()),
    "some": (4, None, torch.rand(ROWS, 4, ENTRIES, generator=torch.Generator().manual_seed(5)) > 0.5),
    "none": (4, None, torch.zeros(ROWS, 4, ENTRIES, dtype=torch.bool)),
}


@pytest.mark.parametrize("slice_", [mla._SLICE, 1])
@pytest.mark.parametrize("case", CASES)
def test_absorbed_attention_equals_expanded(case: str, slice_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KA-08 among them: a query that sees nothing gives 0. Queries may go one by one."""
    monkeypatch.setattr(mla, "_SLICE", slice_)
    queries, mask, seen = CASES[case]
    query, entries = drawn(ROWS, HEADS, queries, SIZES.head, seed=1), drawn(ROWS, 1, ENTRIES, SIZES.width, seed=2)
    up = drawn(HEADS, SIZES.nope + SIZES.value, SIZES.kv_rank, seed=3) * 0.3
    rule: Mask = Bias.of(seen[:, None], torch.float32) if mask is None else mask
    out = values(SIZES(absorbed(query, up), view_of(entries), rule), up)
    torch.testing.assert_close(out.double(), slowly(query, up, entries, seen), rtol=0, atol=1e-5)


def test_pages_are_read_where_they_lie() -> None:
    pages = Pages(1, 1, (SIZES.width, 0), 12, torch.float32, "cpu", page=4)
    pages.keys.fill_(torch.nan)
    cache, entries = PagedCache.empty(pages, ROWS), drawn(ROWS, 1, ENTRIES, SIZES.width, seed=2)
    positions = torch.arange(ENTRIES).expand(ROWS, -1).clone()
    positions[1, :3] = -1
    positions[1, 3:] -= 3
    for part in (slice(0, 6), slice(6, ENTRIES)):
        cache.advance(positions[:, part])
        view = cache.append(0, entries[:, :, part], entries[:, :, part, :0])
    assert isinstance(view, PagedView)
    query, up = drawn(ROWS, HEADS, 1, SIZES.head, seed=1), drawn(HEADS, SIZES.nope + SIZES.value, SIZES.kv_rank, seed=3) * 0.3
    out = values(SIZES(absorbed(query, up), view, Everything()), up)
    torch.testing.assert_close(out.double(), slowly(query, up, entries, (positions >= 0)[:, None]), rtol=0, atol=1e-5)


def test_deepseek_v3_absorbs_up_to_170_tokens() -> None:
    """By the count of products for each head and cached token: 1,088 a query, against 320 and 131,072 once."""
    sizes = Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128)
    assert sizes.width == 576 and sizes.scale == pytest.approx(192**-0.5)
    assert sizes.absorbs(1) and sizes.absorbs(170) and not sizes.absorbs(171)


@pytest.mark.parametrize(("change", "message"), [({"kv_rank": 0}, "kv_rank is 0"), ({"rope": 5}, "rope is 5"), ({"value": 11}, "wider")])
def test_sizes_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Latent(**{"q_rank": 0, "kv_rank": 16, "nope": 6, "rope": 4, "value": 5, **change})
