"""A cache by segments of thought: slots taken in place, bits by kind, budgets, and what is left of a segment."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.entries import Arriving
from mmsdk.kv.policies.thinkv import Thinkv
from mmsdk.kv.segments import SEGMENT
from mmsdk.kv.thoughts import Thoughts, sparse

KV_HEADS, HEADS, WIDTH = 2, 4, 16


def asking(positions: Tensor) -> Asking:
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(WIDTH, 1e4, Unscaled())(positions, torch.float32))


def told(store: Thoughts, x: tuple[Tensor, Tensor, Tensor], start: int, stop: int, blank: int = 0) -> Tensor:
    at = torch.stack((torch.arange(start, stop), torch.arange(start, stop) - blank)).clamp_min(-1)
    store.append(Arriving.of(at, at[:, 0].clamp_min(0)), x[1][:, :, start:stop], x[2][:, :, start:stop])
    return store.attend(x[0][:, :, start:stop], asking(at))


def drawn(tokens: int, sharp: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, tokens, WIDTH, generator=generator) * sharp
    return query, *(torch.randn(2, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))


def prompted(policy: Thinkv, amount: int | float, x: tuple[Tensor, Tensor, Tensor], length: int, blank: int = 0) -> Thoughts:
    store = policy.store(0, 1, amount)
    told(store, x, 0, length, blank)
    store.settle()
    return store


def test_sparsity_is_that_of_the_weights_written_out() -> None:
    x = drawn(20, sharp=3.0)
    store = Thinkv().store(0, 1, 8)
    told(store, x, 0, 20, 4)
    at = torch.tensor([[15, 19], [11, 15]])
    found = sparse(x[0][:, :, [15, 19]], at, store._entries.rows())
    for row, blank in ((0, 0), (1, 4)):
        for place, column in enumerate((15, 19)):
            shares = []
            for head in range(HEADS):
                weights = (x[1][row, head // 2, blank : column + 1] @ x[0][row, head, column] * WIDTH**-0.5).softmax(0)
                shares.append(float((weights < 0.01 * weights.max()).float().mean()))
            assert float(found[row, place]) == pytest.approx(sum(shares) / HEADS)


@pytest.mark.parametrize(("borders", "bits"), [((0.0, 2.0), 4), ((0.0, 0.0), 2)])
def test_tokens_are_rounded_in_the_bits_of_their_kind(borders: tuple[float, float], bits: int) -> None:
    """All reasoning, or all transition; no error exceeds half a step of its sixteen channels."""
    x = drawn(8 + SEGMENT)
    store = prompted(Thinkv(low=borders[0], high=borders[1]), 4 * SEGMENT, x, 8, blank=3)
    told(store, x, 8, 8 + SEGMENT, blank=3)
    view, pools = store.view(), store._pools
    assert [int((pool.positions >= 8).sum()) > 0 for pool in pools] == [bits == 4, bits == 2]
    for row, blank in ((0, 0), (1, 3)):
        held = view.positions[row] >= 8
        columns = view.positions[row][held] + blank
        for found, true in ((view.keys, x[1]), (view.values, x[2])):
            truth = true[row][:, columns]
            step = (truth.amax(-1) - truth.amin(-1)) / (2**bits - 1)
            assert ((found[row][:, held] - truth).abs().amax(-1) <= step / 2 * 1.001 + 1e-5).all()


def test_what_is_read_is_attention_to_all_that_is_held() -> None:
    x = drawn(200)
    store = prompted(Thinkv(low=0.0, high=2.0), 90, x, 170, blank=20)
    for step in range(170, 174):
        out, view = told(store, x, step, step + 1, 20), store.view()
        for row in range(2):
            keys, values = (part[row][:, view.valid[row]].repeat_interleave(2, 0) for part in (view.keys, view.values))
            scores = torch.einsum("hd,htd->ht", x[0][row, :, step], keys) * WIDTH**-0.5
            torch.testing.assert_close(out[row, :, 0], torch.einsum("ht,htd->hd", scores.softmax(-1), values), rtol=1e-4, atol=1e-5)


def test_budgets_hold_over_a_long_answer_and_slots_are_taken_again_in_place() -> None:
    x, keep = drawn(900), 100
    store = prompted(Thinkv(low=0.0, high=2.0), keep, x, 300)
    slots, memory = store.span, store._pools[0].keys.codes.shape
    for step in range(300, 900):
        told(store, x, step, step + 1)
        assert (store.lengths <= keep + SEGMENT).all()
    assert store._pools[0].keys.codes.shape == memory and store.span <= slots + 2 * KV_HEADS * (SEGMENT + 40)
    view = store.view()
    assert (view.positions[:, -1] == 899).all()
    real = [set(row[row >= 0].tolist()) for row in view.positions]
    assert all(len(one) == int(length) for one, length in zip(real, store.lengths[:, 0], strict=True))
    # segments from before are still known by a few of their tokens
    assert all(min(one) < 400 for one in real)


def test_after_transitions_older_segments_keep_less_and_a_prompt_is_none() -> None:
    x, policy = drawn(7 * SEGMENT), Thinkv(low=0.0, high=0.0)
    store = prompted(policy, 10 * SEGMENT * 4, x, 2 * SEGMENT)
    assert store._table[0].kind.tolist() == [[2, 2]] * 2
    for segment in range(2, 7):
        told(store, x, segment * SEGMENT, (segment + 1) * SEGMENT)
    kept = [int(((store.view().positions[0] // SEGMENT) == segment).sum()) for segment in range(7)]
    assert kept == [4, 4, 8, 16, 32, 64, 128]
    assert store._table[0].kind[:, 2:].unique().tolist() == [0]


def test_a_segment_closed_while_decoding_is_that_of_the_prompt() -> None:
    """Keys, values and what stays are the same; kinds are fixed by the borders."""
    x, policy = drawn(3 * SEGMENT), Thinkv(low=0.0, high=2.0)
    whole = prompted(policy, 4 * SEGMENT, x, 3 * SEGMENT).view()
    store = prompted(policy, 4 * SEGMENT, x, 2 * SEGMENT)
    for step in range(2 * SEGMENT, 3 * SEGMENT):
        told(store, x, step, step + 1)
    later = store.view()
    assert later.positions[later.valid].tolist() == whole.positions[whole.valid].tolist()
    torch.testing.assert_close(later.keys[:, :, later.valid[0]], whole.keys[:, :, whole.valid[0]])


def test_bytes_really_fall() -> None:
    x = drawn(600)
    store = Thinkv().store(0, 1, 0.5)
    told(store, x, 0, 600)
    exact = store.nbytes
    store.settle()
    assert store.nbytes < 0.4 * exact and store.span < 2 * KV_HEADS * 320


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(BudgetError, match="borders"):
        Thinkv(low=0.9, high=0.5)
    with pytest.raises(InputError, match="segments decide"):
        prompted(Thinkv(), 8, drawn(20), 20).keep(torch.zeros(2, 1, dtype=torch.long))
