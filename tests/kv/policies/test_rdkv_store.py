"""Prompts in as many bits as they are worth: what is kept, how far off it is, and how many bytes it takes."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.bounded import bounding
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import BudgetError, InputError, PluginError
from mmsdk.kv.entries import Arriving
from mmsdk.kv.graded import Graded
from mmsdk.kv.policies.omnitide import Omnitide
from mmsdk.kv.policies.rdkv import Rdkv
from mmsdk.kv.policies.thinkv import Thinkv
from mmsdk.kv.policies.tiered import Tiered
from mmsdk.kv.policy import LayerStore

KV_HEADS, HEADS, WIDTH = 2, 4, 16


def asking(positions: Tensor) -> Asking:
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(WIDTH, 1e4, Unscaled())(positions, torch.float32))


def told(store: LayerStore, x: tuple[Tensor, Tensor, Tensor], start: int, stop: int, blank: int = 0) -> Tensor:
    at = torch.stack((torch.arange(start, stop), torch.arange(start, stop) - blank)).clamp_min(-1)
    store.append(Arriving.of(at, at[:, 0].clamp_min(0)), x[1][:, :, start:stop], x[2][:, :, start:stop])
    return store.attend(x[0][:, :, start:stop], asking(at))


def drawn(tokens: int, loud: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; three channels of the keys are `loud` for every token, as in models with biases of keys."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, tokens, WIDTH, generator=generator)
    keys, values = (torch.randn(2, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))
    keys[..., :3] += loud
    return query, keys, values


def prompted(amount: int | float, x: tuple[Tensor, Tensor, Tensor], length: int, blank: int = 0, window: int = 8) -> Graded:
    store = Rdkv(window=window).store(0, 1, amount)
    told(store, x, 0, length, blank)
    store.settle()
    return store


def test_sixteen_bits_for_everything_is_exact() -> None:
    x, store = drawn(40), Rdkv(window=8).store(0, 1, 1.0)
    told(store, x, 0, 32, 5)
    before = store.view()
    store.settle()
    after = store.view()
    for row, blank in ((0, 0), (1, 5)):
        assert torch.equal(after.keys[row, :, blank:], before.keys[row, :, blank:])
        assert torch.equal(after.values[row, :, blank:], before.values[row, :, blank:])
    assert after.positions.tolist() == before.positions.tolist()


@pytest.mark.parametrize("amount", [0.5, 0.25, 12])
def test_the_budget_of_bits_is_met_and_the_last_tokens_are_as_they_were(amount: int | float) -> None:
    x = drawn(100)
    store = prompted(amount, x, 96, blank=16)
    (packed,) = store._packed
    keeps = [amount, amount] if isinstance(amount, int) else [round(96 * amount), round(80 * amount)]
    each = packed.positions[0].numel()
    for row, keep in enumerate(keeps):
        bits = sum(int((grade.place // each == row).sum()) * grade.bits for grade in packed.grades)
        assert keep * 16 * KV_HEADS - 8 <= bits <= keep * 16 * KV_HEADS
    last = min(8, int(keeps[0]) // 2)
    keys, values = packed.unpacked(torch.float32)
    assert torch.equal(keys[:, :, -last:], x[1][:, :, 96 - last : 96]) and torch.equal(values[:, :, -last:], x[2][:, :, 96 - last : 96])


def test_ka_18_errors_stay_within_a_step_of_each_entry_however_loud_some_channels_are() -> None:
    x = drawn(200, loud=30.0)
    store = prompted(0.4, x, 200)
    (packed,) = store._packed
    keys, values = packed.unpacked(torch.float32)
    wide = packed.positions.long().clamp_min(0)[..., None].expand_as(keys)
    for found, true, spread in ((keys, x[1], packed.spread), (values, x[2], torch.ones_like(packed.spread))):
        even = (true - (packed.middle if found is keys else 0 * packed.middle)[:, :, None]) / spread[:, :, None]
        truth, error = even.gather(2, wide), ((found - true.gather(2, wide)) / spread[:, :, None]).abs().amax(-1)
        span = truth.amax(-1) - truth.amin(-1)
        assert len(packed.grades) >= 3
        for grade in packed.grades:
            step = span.flatten()[grade.place] / (2 ** (grade.bits + 1) - 2) if grade.bits < 16 else torch.zeros(1)
            assert (error.flatten()[grade.place] <= step * 1.01 + 1e-4).all()


def test_what_is_read_is_attention_to_what_was_kept() -> None:
    x = drawn(60)
    store = prompted(0.3, x, 50, blank=7)
    for step in range(50, 60):
        out = told(store, x, step, step + 1, 7)
        view = store._heads()
        scores = torch.einsum("nrd,ntd->nrt", x[0][:, :, step].reshape(4, 2, WIDTH), view.keys[:, 0]) * WIDTH**-0.5
        weights = scores.masked_fill(~view.valid[:, None], -torch.inf).softmax(-1)
        torch.testing.assert_close(out[:, :, 0], torch.einsum("nrt,ntd->nrd", weights, view.values[:, 0]).reshape(2, HEADS, WIDTH))
    assert torch.equal(view.keys[:, 0, -10:], x[1][:, :, 50:].flatten(0, 1))


def test_bytes_really_fall_and_heads_keep_their_own() -> None:
    x = drawn(256)
    whole = Rdkv(window=8).store(0, 1, 0.125)
    told(whole, x, 0, 256)
    exact = whole.nbytes
    whole.settle()
    told(whole, (x[0], x[1], x[2]), 255, 256)
    assert whole.nbytes < 0.5 * exact and whole.read_bytes < 0.5 * exact
    assert whole.lengths.shape == (2, KV_HEADS) and len(whole.lengths.unique()) > 1
    assert (whole.lengths > 32).all()


def test_a_memory_that_has_read_nothing_has_nothing_to_settle() -> None:
    x = drawn(20)
    for policy in (Rdkv(window=8), Thinkv(), Omnitide(), Tiered()):
        store = policy.store(0, 1, 8)
        store.settle()
        told(store, x, 0, 20)
        store.settle()
        assert int(store.lengths.max()) <= 20 and told(store, x, 19, 20).isfinite().all()


def test_a_stream_is_refused_since_only_prompts_are_rounded() -> None:
    with pytest.raises(PluginError, match="rdkv lets go of nothing"):
        bounding("rdkv:64")
    assert [bounding(f"{name}:64")[1] for name in ("thinkv", "omnitide", "tiered")] == [64, 64, 64]


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(BudgetError, match="window=0"):
        Rdkv(window=0)
    with pytest.raises(InputError, match="bits decide"):
        prompted(8, drawn(20), 20).keep(torch.zeros(2, 1, dtype=torch.long))
