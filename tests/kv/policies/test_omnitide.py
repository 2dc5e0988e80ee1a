"""Units and arenas: what stays, where it lies, and that joining pages changes nothing that can be seen."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.decoder.spans import Span
from mmsdk.decoder.thinning import thin
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.arenas import Arenas, joins
from mmsdk.kv.entries import Arriving
from mmsdk.kv.memory import memory_of
from mmsdk.kv.policies.omnitide import Omnitide
from mmsdk.kv.policy_memory import PolicyMemory
from mmsdk.kv.units import Picking, edges, numbered, parted, picked, scored

KV_HEADS, HEADS, WIDTH = 2, 4, 8
SMALL = Omnitide(unit=8, page=4, sinks=2, recent=2, interval=8, sample=2)


def asking(positions: Tensor) -> Asking:
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(WIDTH, 1e4, Unscaled())(positions, torch.float32))


def told(store: Arenas, x: tuple[Tensor, Tensor, Tensor], start: int, stop: int, kinds: Tensor | None = None, blank: int = 0) -> Tensor:
    at = torch.stack((torch.arange(start, stop), torch.arange(start, stop) - blank)).clamp_min(-1)
    if kinds is not None:
        store.hear(kinds[start:stop].expand(2, -1))
    store.append(Arriving.of(at, at[:, 0].clamp_min(0)), x[1][:, :, start:stop], x[2][:, :, start:stop])
    return store.attend(x[0][:, :, start:stop], asking(at))


def drawn(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, tokens, WIDTH, generator=generator)
    return query, *(torch.randn(2, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))


def scene(words: int, frames: int, size: int) -> Tensor:
    """Words, then frames of tokens with two words in front of each."""
    parts = [torch.zeros(words, dtype=torch.long)]
    for frame in range(frames):
        parts += [torch.zeros(2, dtype=torch.long), torch.full((size,), frame + 1)]
    return torch.cat(parts)


def test_units_are_runs_of_a_kind_in_parts_and_have_edges() -> None:
    kinds = torch.tensor([[9, 0, 0, 0, 1, 1, 2, 2, 2, 0]])
    positions = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]])
    valid = positions >= 0
    unit = numbered(parted(positions, kinds, 2), valid)
    assert unit.tolist() == [[0, 0, 0, 1, 2, 2, 3, 3, 4, 5]]
    assert edges(unit, valid)[0].tolist() == [False, True, True, True, True, True, True, True, True, True]
    long = numbered(parted(positions, kinds, 9), valid)
    assert edges(long, valid)[0].tolist() == [False, True, False, True, True, True, True, False, True, True]


def test_a_token_alone_is_both_edges_of_its_unit_and_stays() -> None:
    unit, valid = torch.zeros(2, 1, dtype=torch.long), torch.tensor([[True], [False]])
    assert torch.equal(edges(unit, valid), valid)
    store = SMALL.store(0, 1, 4)
    told(store, drawn(1), 0, 1)
    store.settle()
    assert store.lengths.flatten().tolist() == [1, 1]


def test_worth_is_the_weight_of_the_kind_times_attention_times_age() -> None:
    unit, kind = torch.tensor([[0, 0, 1, 2]]), torch.tensor([[0, 0, 3, 0]])
    mass = torch.tensor([[0.2, 0.4, 0.8, 0.5]])
    found = scored(unit, torch.ones(1, 4, dtype=torch.bool), mass, kind, Picking((1.0, 0.5), 0.5, 0.9))
    torch.testing.assert_close(found, torch.tensor([[0.3 * 0.81, 0.4 * 0.9, 0.5, -torch.inf]]))


def pick(keep: int, pinned: tuple[int, ...] = ()) -> list[int]:
    """Three units of six tokens of worth 3, 1 and 2; attention falls from the first token of each on."""
    unit, mass = torch.arange(18)[None] // 6, torch.tensor([[6.0, 5, 4, 3, 2, 1] * 3])
    score = torch.full((1, 18), -torch.inf)
    score[0, :3] = torch.tensor([3.0, 1.0, 2.0])
    valid, held = torch.ones(1, 18, dtype=torch.bool), torch.zeros(1, 18, dtype=torch.bool)
    held[0, list(pinned)] = True
    return torch.where(picked(unit, valid, held, mass, score, torch.tensor([keep]), 0.5)[0])[0].tolist()


def test_units_are_thinned_before_any_is_dropped_and_edges_outlive_the_inside() -> None:
    assert pick(18) == list(range(18))
    assert pick(17) == [*range(10), *range(11, 18)]
    assert pick(12) == [*range(6), 6, 7, 11, 12, 13, 17]
    assert pick(9) == [0, 1, 5, 6, 7, 11, 12, 13, 17]
    assert pick(8) == [0, 1, 5, 6, 11, 12, 13, 17]
    assert pick(3) == [0, 1, 5]
    assert pick(0) == []


def test_what_is_pinned_stays_in_any_case() -> None:
    assert pick(5, pinned=(8, 9)) == [0, 1, 5, 8, 9]
    assert pick(0, pinned=(3, 8)) == [3, 8]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 24), st.integers(0, 1000))
def test_the_budget_is_met_exactly(keep: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    unit = torch.randint(0, 2, (3, 24), generator=generator).cumsum(1)
    valid = torch.arange(24) >= torch.tensor([[0], [5], [20]])
    unit = numbered(unit, valid)
    mass, none = torch.rand(3, 24, generator=generator), torch.zeros(3, 24, dtype=torch.bool)
    score = scored(unit, valid, mass, torch.zeros(3, 24, dtype=torch.long), Picking((1.0, 1.0), 0.5, 0.9))
    stays = picked(unit, valid, none, mass, score, torch.full((3,), keep), 0.5)
    assert torch.equal(stays.sum(1), valid.sum(1).clamp_max(keep)) and not (stays & ~valid).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 1000))
def test_joining_pages_keeps_every_token_once_and_frees_pages(pages: int, full: float, seed: int) -> None:
    used = torch.rand(2, 4 * pages, generator=torch.Generator().manual_seed(seed)) < full
    index = joins(used, 4)
    for row in range(2):
        assert sorted(index[row][index[row] >= 0].tolist()) == torch.where(used[row])[0].tolist()
        before, after = (x.view(pages, 4).sum(1) for x in (used[row], index[row] >= 0))
        in_use = after[after > 0].tolist()
        assert len(in_use) <= int((before > 0).sum())
        # no two neighbours are left that fit into one, of which one is less than half full
        assert all(a + b > 4 or min(a, b) >= 2 for a, b in pairwise(in_use))


def test_joining_pages_changes_neither_order_nor_positions_nor_answers_and_sticky_pages_never_move() -> None:
    x, kinds = drawn(140), scene(6, 12, 9)
    store = SMALL.store(0, 1, 90)
    told(store, x, 0, 120, kinds)
    store.settle()
    sticky, volatile = store._arenas
    holes = torch.rand(volatile.told.positions.shape, generator=torch.Generator().manual_seed(1)) < 0.35
    thin = volatile.thinned(holes, compacts=False)
    store._arenas = (sticky, thin)
    before, apart = store.view(), store.fork()
    assert volatile.span > 0
    store._arenas = (sticky, thin.compacted())
    after = store.view()
    assert store.span < apart.span
    assert torch.equal(before.positions[before.valid], after.positions[after.valid])
    for ours, true in ((after.keys, before.keys), (after.values, before.values)):
        assert torch.equal(ours.transpose(1, 2)[after.valid], true.transpose(1, 2)[before.valid])
    assert store._arenas[0] is sticky
    torch.testing.assert_close(told(store, x, 120, 121), told(apart, x, 120, 121))


def test_words_outlive_pictures_and_every_unit_has_its_edges() -> None:
    x, kinds = drawn(200), scene(6, 12, 9)
    store = SMALL.store(0, 1, 60)
    told(store, x, 0, 138, kinds)
    store.settle()
    assert (store.lengths == 60).all()
    stays = set(store.view().positions[0].tolist()) - {-1}
    assert {0, 1, 136, 137} <= stays
    words, seen = (torch.where((kinds == 0) == wanted)[0].tolist() for wanted in (True, False))
    assert sum(place in stays for place in words) / len(words) > sum(place in stays for place in seen) / len(seen)
    volatile = store._arenas[1].told
    assert not ((volatile.kinds == 0) & (volatile.positions >= 0)).any()


def test_what_is_read_is_attention_to_all_that_is_held() -> None:
    x, kinds = drawn(80), scene(4, 5, 8)
    store = SMALL.store(0, 1, 30)
    told(store, x, 0, 54, kinds, blank=0)
    store.settle()
    for step in range(54, 80):
        held, out = store.lengths, told(store, x, step, step + 1)
        if (store.lengths < held).any():
            # what it was shown was thinned afterwards
            continue
        view = store.view()
        for row in range(2):
            keys, values = (part[row][:, view.valid[row]].repeat_interleave(2, 0) for part in (view.keys, view.values))
            weights = (torch.einsum("hd,htd->ht", x[0][row, :, step], keys) * WIDTH**-0.5).softmax(-1)
            torch.testing.assert_close(out[row, :, 0], torch.einsum("ht,htd->hd", weights, values), rtol=1e-4, atol=1e-5)


def test_a_row_is_thinned_when_it_would_be_alone() -> None:
    """One row begins within its budget, the other beyond it; what each holds at every step does not hang on the other."""
    x, blank, prompt = drawn(100), 34, 54
    kinds = scene(4, 5, 8)
    both, alone = SMALL.store(0, 1, 30), [SMALL.store(0, 1, 30) for _ in range(2)]

    def pass_on(start: int, stop: int, heard: Tensor | None = None) -> None:
        whole = told(both, x, start, stop, heard, blank)
        for row, store in enumerate(alone):
            first = max(start, row * blank)
            at = torch.arange(first, stop)[None] - row * blank
            if heard is not None:
                store.hear(heard[None, first:stop])
            store.append(Arriving.of(at, at[:, 0]), *(part[row : row + 1, :, first:stop] for part in x[1:]))
            out = store.attend(x[0][row : row + 1, :, first:stop], asking(at))
            torch.testing.assert_close(whole[row : row + 1, :, first - start :], out, rtol=1e-4, atol=1e-5)
            assert int(both.lengths[row]) == int(store.lengths)

    pass_on(0, prompt, kinds)
    for store in (both, *alone):
        store.settle()
    thinned = [0, 0]
    for step in range(prompt, 100):
        before = both.lengths.flatten().tolist()
        pass_on(step, step + 1)
        thinned = [times + (int(held) <= was) for times, held, was in zip(thinned, both.lengths, before, strict=True)]
    assert thinned == [5, 4], "46 steps, of which the second row takes 18 to go 8 beyond its budget"


def test_an_endless_stream_of_frames_and_words_stays_within_its_memory_and_in_order() -> None:
    x, store = drawn(1200), SMALL.store(0, 1, 40)
    told(store, x, 0, 20)
    store.settle()
    sizes, generator = [], torch.Generator().manual_seed(2)
    place = 20
    while place < 1180:
        frame = bool(torch.rand(1, generator=generator) < 0.5)
        count = 9 if frame else 3
        told(store, x, place, place + count, torch.full((1200,), place if frame else 0))
        place += count
        view = store.view()
        assert torch.equal(view.positions[:, -1], torch.full((2,), place - 1))
        assert ((view.positions.diff(dim=1) > 0) | (view.positions[:, :-1] < 0)).all()
        assert torch.equal(view.keys[0, :, -1], x[1][0, :, place - 1])
        sizes.append(store.nbytes)
    assert max(sizes) == max(sizes[: len(sizes) // 2])
    assert (store.lengths <= 40 + SMALL.interval + 9).all()


def test_positions_close_up_in_place_and_keys_turn_with_them() -> None:
    """Turning a key from its position back to 0 gives the same before and after."""
    x, kinds = drawn(80), scene(4, 5, 8)
    store = SMALL.store(0, 1, 30)
    told(store, x, 0, 54, kinds)
    store.settle()
    told(store, x, 54, 55)
    before, span = store.view(), store.span
    store.close_up(torch.zeros(2, dtype=torch.long))
    after = store.view()
    assert store.span == span and after.positions.tolist() == [[*[-1] * (after.positions.shape[1] - 31), *range(31)]] * 2
    held, turning = before.valid[0], store._turning
    for view in (before, after):
        view.keys[:] = turning.further(view.keys, -view.positions[:, None])
    torch.testing.assert_close(after.keys[:, :, held], before.keys[:, :, held], rtol=1e-4, atol=1e-5)
    assert torch.equal(after.values[:, :, held], before.values[:, :, held])


@torch.no_grad()
def test_a_prompt_with_pictures_tells_every_layer_which_tokens_they_are() -> None:
    """As a pipeline reads it, each chunk by itself; the second row is shorter."""
    config = DecoderConfig(vocabulary=50, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, inner=40, context=512)
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    decoder = Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()})
    spans = [[Span(-1, (3,)), Span(0, (40,)), Span(-1, (5,))], [Span(0, (20,)), Span(-1, (4,))]]
    positions = torch.stack((torch.arange(48), (torch.arange(48) - 24).clamp_min(-1)))
    for chunk in (48, 7):
        found = memory_of("omnitide:24,page=4,recent=2,sinks=2,unit=8")
        assert isinstance(found, PolicyMemory)
        cache = found.cache(config.layers, 2, "cpu")
        x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(1))
        thin(decoder, x, positions, cache, spans, (), chunk)
        cache.settle()
        for store in cache._stores:
            assert isinstance(store, Arenas)
            for arena, kind in zip(store._arenas, (False, True), strict=True):
                told = arena.told
                inside = told.positions >= 0
                seen = torch.where(torch.tensor([[0], [1]]) == 0, (told.positions >= 3) & (told.positions < 43), told.positions < 20)
                assert inside.any(1).all() and torch.equal((told.kinds > 0)[inside], seen[inside])
                assert not kind or bool((told.kinds > 0)[inside].all())


def test_what_cannot_be_is_told() -> None:
    for wrong in ({"page": 0}, {"share": 0.0}, {"sight": -1.0}):
        with pytest.raises(BudgetError, match="omnitide"):
            Omnitide(**wrong)
    store = SMALL.store(0, 1, 8)
    store.hear(torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(InputError, match="kinds were told"):
        told(store, drawn(6), 0, 6)
    with pytest.raises(InputError, match="units decide"):
        store.keep(torch.zeros(2, 1, dtype=torch.long))
