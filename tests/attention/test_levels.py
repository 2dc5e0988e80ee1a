"""Attention over levels against loops over single queries and tokens, written from the formulas; what an indexer picks against a sort."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.attention.csa import Picked, overlapped
from mmsdk.attention.hca import Far, complete, pooled
from mmsdk.attention.indexer import picks, scores
from mmsdk.attention.levels import Level, attend
from mmsdk.attention.swa import Recent
from mmsdk.kv.types import LayerView

ROWS, HEADS, WIDTH = 2, 3, 8


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def view_of(keys: Tensor, positions: Tensor, ordered: bool) -> LayerView:
    valid = positions >= 0
    return LayerView(keys[:, None], keys[:, None], positions, valid, valid.sum(1), ordered)


def slow(query: Tensor, seen: list[Tensor], sink: float) -> Tensor:
    """One query over the entries that it sees."""
    logits = [float(query.double() @ entry.double()) / math.sqrt(len(query)) for entry in seen]
    total = math.exp(sink) + sum(map(math.exp, logits))
    return sum(
        (math.exp(logit) / total * entry.double() for logit, entry in zip(logits, seen, strict=True)), torch.zeros(len(query)).double()
    )


def expect(out: Tensor, query: Tensor, sinks: Tensor, seen: dict[tuple[int, int], list[Tensor]]) -> None:
    for (row, step), entries in seen.items():
        for head in range(HEADS):
            want = slow(query[row, head, step], entries, float(sinks[head])).float()
            torch.testing.assert_close(out[row, head, step], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ordered", [True, False])
def test_window_far_and_picked_entries_share_one_softmax_with_the_sink(ordered: bool) -> None:
    held, new, window, rate = 9, 14, 5, 4
    positions = torch.arange(held + new).expand(ROWS, -1)
    keys, far, picked, sinks = noise(ROWS, held + new, WIDTH), noise(ROWS, 6, WIDTH), noise(ROWS, 7, WIDTH), noise(HEADS)
    query, queries = noise(ROWS, HEADS, new, WIDTH), positions[:, held:]
    index = torch.where(noise(ROWS, new, 3) < 0, -1, noise(ROWS, new, 7, seed=3).argsort(-1)[..., :3])
    levels: list[Level] = [
        Recent.of(view_of(keys, positions, ordered), queries, window),
        Far(far, complete(queries, rate), held // rate),
        Picked(picked, index),
    ]
    seen = {}
    for row in range(ROWS):
        for step in range(new):
            at = held + step
            near = [keys[row, place] for place in range(at - window + 1, at + 1)]
            behind = [far[row, entry] for entry in range(6) if (entry + 1) * rate <= at + 1]
            seen[row, step] = near + behind + [picked[row, entry] for entry in index[row, step].tolist() if entry >= 0]
    expect(attend(query, levels, sinks), query, sinks, seen)


@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_ka_07_the_window_holds_exactly_its_width(length: int) -> None:
    window, positions = 2048, torch.arange(length)[None]
    keys, query = noise(1, length, WIDTH), noise(1, HEADS, length, WIDTH)
    levels = [Recent.of(view_of(keys, positions, True), positions, window)]
    out = attend(query, levels, torch.full((HEADS,), -torch.inf))[:, :, -1]
    last = keys[:, max(0, length - window) :]
    want = (query[:, :, -1] @ last.transpose(1, 2) * WIDTH**-0.5).softmax(-1) @ last
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)


def test_ka_08_a_query_that_sees_nothing_gives_zero_with_a_sink() -> None:
    levels = [Far(noise(1, 4, WIDTH), torch.zeros(1, 3, dtype=torch.long)), Picked(noise(1, 4, WIDTH), torch.full((1, 3, 2), -1))]
    out = attend(noise(1, HEADS, 3, WIDTH), levels, noise(HEADS))
    assert torch.equal(out, torch.zeros_like(out))


def test_padding_is_seen_by_nothing_and_sees_nothing() -> None:
    positions = torch.tensor([[-1, 0, -1, 1, 2]])
    keys, query, sinks = noise(1, 5, WIDTH), noise(1, HEADS, 5, WIDTH), noise(HEADS)
    out = attend(query, [Recent.of(view_of(keys, positions, False), positions, 2)], sinks)
    expect(
        out,
        query,
        sinks,
        {(0, 0): [], (0, 1): [keys[0, 1]], (0, 2): [], (0, 3): [keys[0, 1], keys[0, 3]], (0, 4): [keys[0, 3], keys[0, 4]]},
    )


def test_slices_of_queries_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    count, window = 50, 7
    positions = torch.arange(count)[None]
    keys, far, query, sinks = noise(1, count, WIDTH), noise(1, 12, WIDTH), noise(1, HEADS, count, WIDTH), noise(HEADS)
    levels = [Recent.of(view_of(keys, positions, True), positions, window), Far(far, complete(positions, 4))]
    whole = attend(query, levels, sinks)
    monkeypatch.setattr("mmsdk.attention.levels._QUERIES", 8)
    torch.testing.assert_close(attend(query, levels, sinks), whole, rtol=0, atol=1e-6)


def test_an_entry_is_pooled_token_by_token_and_channel_by_channel() -> None:
    content, gates = noise(ROWS, 3, 4, WIDTH), noise(ROWS, 3, 4, WIDTH, seed=1)
    entries = pooled(content, gates)
    for row in range(ROWS):
        for window in range(3):
            for channel in range(WIDTH):
                weights = [math.exp(gate) for gate in gates[row, window, :, channel].tolist()]
                want = sum(w * c for w, c in zip(weights, content[row, window, :, channel].tolist(), strict=True)) / sum(weights)
                assert float(entries[row, window, channel]) == pytest.approx(want, abs=1e-5)


def test_overlapping_windows_take_series_a_of_the_one_before_and_their_own_series_b() -> None:
    series = noise(1, 4, 2, 2 * WIDTH)
    joined = overlapped(series)
    assert joined.shape == (1, 3, 4, WIDTH)
    for window in range(3):
        assert torch.equal(joined[0, window, :2], series[0, window, :, :WIDTH]) and torch.equal(
            joined[0, window, 2:], series[0, window + 1, :, WIDTH:]
        )


@pytest.mark.parametrize("count", [3, 20, 700, 1024])
@pytest.mark.parametrize(("heads", "gpu"), [(1, False), (4, False), (4, True)])
def test_an_indexer_picks_the_best_that_a_query_may_see(count: int, heads: int, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the choice is the operation's, whose reference runs here."""
    monkeypatch.setattr("mmsdk.attention.indexer._TILE", 256)
    monkeypatch.setattr("mmsdk.attention.indexer.launchable", lambda tensor: gpu)
    new, most = 70, 6
    query, keys = noise(ROWS, new, heads, 5), noise(ROWS, count, 5)
    weights = noise(ROWS, new, heads).abs()
    seen = torch.linspace(0, count, new).long().expand(ROWS, -1)
    found = picks(query, weights, keys, seen, most)
    for row in range(ROWS):
        for step in range(new):
            worth = sum(
                weights[row, step, head].double() * (keys[row].double() @ query[row, step, head].double()).clamp_min(0)
                for head in range(heads)
            )
            visible = int(seen[row, step])
            chosen = [entry for entry in found[row, step].tolist() if entry >= 0]
            assert len(chosen) == len(set(chosen)) == min(most, visible) and all(entry < visible for entry in chosen)
            best = worth[:visible].sort(descending=True).values[: len(chosen)]
            torch.testing.assert_close(worth[chosen].sort(descending=True).values, best, rtol=0, atol=1e-5)


def test_settled_entries_need_no_mask_and_give_the_same_picks() -> None:
    query, keys, weights = noise(1, 9, 2, 5), noise(1, 50, 5), noise(1, 9, 2)
    seen = torch.arange(41, 50)[None]
    assert torch.equal(picks(query, weights, keys, seen, 7, settled=41).sort().values, picks(query, weights, keys, seen, 7).sort().values)


def test_scores_are_weighed_rectified_products() -> None:
    query, weights, keys = noise(1, 2, 3, 4), noise(1, 2, 3), noise(1, 5, 4)
    want = torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", query, keys).relu())
    torch.testing.assert_close(scores(query, weights, keys), want, rtol=0, atol=1e-5)
