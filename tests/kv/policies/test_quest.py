"""Bounds of pages against every token in them, and which pages are read."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import BudgetError
from mmsdk.kv.blocked import blocked, folded
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policies.quest import Quest, best, worth
from mmsdk.kv.shelf import attended


def asking(positions: Tensor) -> Asking:
    """What a decoder lends for new tokens at these positions."""
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(8, 1e4, Unscaled())(positions, torch.float32))


def held(tokens: int, padding: int) -> Entries:
    """Two rows of tokens, the second with padding in front, in one layer's entries."""
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.stack((torch.arange(tokens), torch.arange(tokens) - padding)).clamp_min(-1)
    entries = Entries(0, 1)
    entries.append(
        Arriving.of(positions, torch.zeros(2, dtype=torch.long)), *(torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(2))
    )
    return entries


def edges(entries: Entries, page: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    blocks = blocked(entries, page)
    return folded(blocks, "amin", torch.inf), folded(blocks, "amax", -torch.inf), blocks.sizes


def test_no_token_exceeds_the_bound_of_its_page_and_the_bound_is_the_papers() -> None:
    """The second row has three tokens of padding in front: its pages begin behind them, and its last one is not full."""
    entries, query = held(22, 3), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    found = worth(query, *edges(entries))
    for row, blank in ((0, 0), (1, 3)):
        for head in range(2):
            for page in range(-(-(22 - blank) // 4)):
                real = entries.keys[row, head, blank + 4 * page : blank + 4 * page + 4]
                asked = query[row, 2 * head : 2 * head + 2]
                ends = zip(real.amin(0).tolist(), real.amax(0).tolist(), strict=True)
                pairs = list(ends)
                sums = [sum(max(q * a, q * b) for q, (a, b) in zip(one.tolist(), pairs, strict=True)) for one in asked]
                assert found[row, head, page].item() == pytest.approx(max(sums), abs=1e-5)
                assert (asked @ real.T).amax() <= found[row, head, page] + 1e-5
    assert (found[1, :, 5] == -torch.inf).all()


def test_the_newest_page_is_read_and_the_rest_goes_by_worth() -> None:
    rank = torch.tensor([[[5.0, 1.0, 4.0, torch.inf, -torch.inf]]])
    assert sorted(best(rank, torch.tensor([3]), 3)[0, 0].tolist()) == [0, 2, 3]
    assert sorted(best(rank, torch.tensor([2]), 3)[0, 0].tolist()) == [-1, 0, 3]
    assert sorted(best(rank, torch.tensor([5]), 5)[0, 0].tolist()) == [-1, 0, 1, 2, 3]


def test_a_needle_is_found_in_the_page_of_the_largest_bound() -> None:
    entries, query = held(200, 0), torch.randn(2, 4, 1, 8)
    entries.keys[0, 1, 77] = 12 * query[0, 2, 0] / query[0, 2, 0].norm()
    entries.values[0, 1, 77] = 50.0
    out = Quest(page=4).read(query, entries, asking(torch.full((2, 1), 199)), torch.tensor([8, 8]))
    assert (out[0, 2] > 20).all() and (out[0, 0].abs() < 20).all()


@pytest.mark.parametrize("tokens", [3, 38, 40])
def test_a_budget_for_all_pages_reads_as_exact_attention_does_padding_or_not(tokens: int) -> None:
    entries, query = held(tokens, 2), torch.randn(2, 4, 1, 8)
    ask = asking(torch.tensor([[tokens - 1], [tokens - 3]]))
    out = Quest(page=4).read(query, entries, ask, torch.tensor([tokens, tokens]))
    torch.testing.assert_close(out, attended(query, entries, ask))


def test_few_pages_are_read_and_nothing_is_lost() -> None:
    entries, query, ask = held(203, 30), torch.randn(2, 4, 1, 8), asking(torch.tensor([[202], [172]]))
    before = entries.keys.clone()
    Quest(page=4).read(query, entries, ask, torch.tensor([40, 34]))
    assert entries.read == 2 * 2 * (10 * 4 + 51) and torch.equal(entries.keys, before)
    with pytest.raises(BudgetError, match="page=0"):
        Quest(page=0)


def test_a_layer_with_a_window_of_its_own_sees_that_and_no_more() -> None:
    """As in Gemma 3, whose local layers see the last positions alone."""
    entries, query = held(100, 0), torch.randn(2, 4, 1, 8)
    ask = asking(torch.full((2, 1), 99))
    local = Asking(Dense(), Masks(ask.positions, torch.float32, None, window=5), ask.rotation)
    out = Quest(page=4).read(query, entries, local, torch.tensor([16, 16]))
    entries.values[:, :, :95] += 7
    torch.testing.assert_close(Quest(page=4).read(query, entries, local, torch.tensor([16, 16])), out)
