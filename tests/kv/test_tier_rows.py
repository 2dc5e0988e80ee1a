"""Rows in three levels, side by side, against the same rows each by itself."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.abreast import Abreast, abreast, apart
from mmsdk.kv.entries import Arriving
from mmsdk.kv.policies.tiered import Tiered
from mmsdk.kv.policy_cache import PolicyCache
from mmsdk.kv.policy_memory import PolicyMemory
from mmsdk.kv.tiers import Tiers

HEADS, KV_HEADS, WIDTH = 4, 2, 8
POLICY = Tiered(block=4, sinks=3, interval=6, mid=0.4, recall=0.4)
LENGTHS = 70, 171, 9, 128
CONFIG = DecoderConfig(vocabulary=50, width=24, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=512)


def asking(at: Tensor, window: int = 0) -> Asking:
    masks = Masks(at, torch.float32, None, window=window) if window else Masks(at, torch.float32, None)
    return Asking(Dense(), masks, Rope(WIDTH, 1e4, Unscaled())(at, torch.float32))


def drawn(generator: torch.Generator, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(rows, HEADS, tokens, WIDTH, generator=generator) * 2
    return query, *(torch.randn(rows, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))


def given(store: Tiers | Abreast, at: Tensor, new: tuple[Tensor, Tensor, Tensor], window: int = 0) -> Tensor:
    store.append(Arriving.of(at, at[:, 0].clamp_min(0)), *new[1:])
    return store.attend(new[0], asking(at, window))


def prompted(lengths: Sequence[int], amount: int | float, window: int = 0) -> list[Tiers]:
    """Rows that hold so many tokens: prompts, and a few behind them, so that levels of one do not move when those of others do."""
    stores, generator = list[Tiers](), torch.Generator().manual_seed(3)
    for later, length in enumerate(lengths):
        store = POLICY.store(0, 1, amount)
        given(store, torch.arange(length - later)[None], drawn(generator, 1, length - later), window)
        store.settle()
        for place in range(length - later, length):
            given(store, torch.tensor([[place]]), drawn(generator, 1, 1), window)
        stores.append(store)
    return stores


def agree(joint: Abreast, alone: Sequence[Tiers]) -> None:
    """What is held is the same to the bit, and so is what is told of it."""
    assert joint.lengths.tolist() == [store.lengths.tolist()[0] for store in alone]
    for mine, store in zip(joint.rows, alone, strict=True):
        assert mine.read_bytes == store.read_bytes
        held, wanted = mine.view(), store.view()
        for name in ("keys", "values", "positions", "valid"):
            assert torch.equal(getattr(held, name), getattr(wanted, name))


@pytest.mark.parametrize(("amount", "s"), [(0.4, 1), (0.4, 3), (40, 1), (400, 1)])
def test_rows_get_what_each_would_alone(amount: int | float, s: int) -> None:
    """Of other lengths and budgets, with other blocks recalled; levels move at other times, and one row has none at first."""
    alone, joint = prompted(LENGTHS, amount), Abreast(prompted(LENGTHS, amount))
    at, generator = torch.tensor(LENGTHS)[:, None] + torch.arange(s), torch.Generator().manual_seed(4)
    moved: list[list[bool]] = []
    for step in range(0, 48, s):
        new, held = drawn(generator, len(LENGTHS), s), [store._entries.count for store in alone]
        out = given(joint, at + step, new)
        wanted = torch.cat([given(store, at[row, None] + step, tuple(x[row, None] for x in new)) for row, store in enumerate(alone)])  # type: ignore[arg-type]
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
        moved.append([store._entries.count != before + s for store, before in zip(alone, held, strict=True)])
        if step % 10 == 0:
            agree(joint, alone)
    agree(joint, alone)
    assert amount == 400 or any(any(rows) and not all(rows) for rows in moved)


def test_a_layer_with_a_window_of_its_own_is_read_together_too() -> None:
    alone, joint = prompted(LENGTHS, 20, window=16), Abreast(prompted(LENGTHS, 20, window=16))
    at, generator = torch.tensor(LENGTHS)[:, None], torch.Generator().manual_seed(4)
    for step in range(20):
        new = drawn(generator, len(LENGTHS), 1)
        out = given(joint, at + step, new, 16)
        wanted = torch.cat([given(store, at[row, None] + step, tuple(x[row, None] for x in new), 16) for row, store in enumerate(alone)])  # type: ignore[arg-type]
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert joint.lengths.flatten().tolist() == [length + 20 for length in LENGTHS]


def test_no_row_is_touched_by_itself_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = Abreast(prompted((100, 100, 100), 40))
    at, generator = torch.full((3, 1), 100), torch.Generator().manual_seed(4)
    given(joint, at, drawn(generator, 3, 1))
    # of the last row two came before
    room = POLICY.interval - 2

    def touched(*_: object) -> None:
        raise AssertionError("a row was asked by itself")

    with monkeypatch.context() as patch:
        for name in ("append", "attend", "age", "told"):
            patch.setattr(Tiers, name, touched)
        for step in range(1, room):
            given(joint, at + step, drawn(generator, 3, 1))
        with pytest.raises(AssertionError, match="by itself"):
            given(joint, at + room, drawn(generator, 3, 1))


def test_a_fork_and_what_it_left_do_not_meet() -> None:
    joint, generator = Abreast(prompted(LENGTHS, 0.4)), torch.Generator().manual_seed(4)
    at = torch.tensor(LENGTHS)[:, None]
    given(joint, at, drawn(generator, 4, 1))
    other, before = joint.fork(), joint.view()
    for step in range(1, 24):
        given(joint, at + step, drawn(generator, 4, 1))
    torch.testing.assert_close(other.view().keys, before.keys, rtol=0, atol=0)
    kept = joint.view()
    for step in range(1, 24):
        given(other, at + step, drawn(generator, 4, 1))
    torch.testing.assert_close(joint.view().keys, kept.keys, rtol=0, atol=0)


@pytest.fixture(scope="module")
def model() -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(CONFIG).state_dict().items()}
    return Decoder.of(CONFIG, {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()})


@torch.no_grad()
def spoken(model: Decoder, cache: PolicyCache, words: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy words, and the last of them, which is not read yet."""
    said = [words]
    for _ in range(steps):
        hidden = model(model.embed(said[-1]), cache.position[:, None], cache)
        said.append(model.logits(hidden[:, -1]).argmax(-1, keepdim=True))
    return torch.cat(said[1:], 1), said[-1]


@torch.no_grad()
def test_answers_are_those_of_one_by_one_and_rows_come_and_go(model: Decoder) -> None:
    memory, generator = PolicyMemory(POLICY, 0.4), torch.Generator().manual_seed(5)
    prompts, alone, caches, first = [], [], [], []
    for length in LENGTHS:
        prompt = torch.randint(50, (1, length), generator=generator)
        for kept in (alone, caches):
            cache = memory.cache(CONFIG.layers, 1, "cpu")
            hidden = model(model.embed(prompt), torch.arange(length)[None], cache)
            memory.learn(cache, [()])
            kept.append(cache)
        prompts.append(prompt)
        first.append(model.logits(hidden[:, -1]).argmax(-1, keepdim=True))
    wanted = [spoken(model, cache, word, 40)[0] for cache, word in zip(alone, first, strict=True)]
    together = abreast(caches)
    said, last = spoken(model, together, torch.cat(first), 20)
    assert torch.equal(said, torch.cat([words[:, :20] for words in wanted]))
    rows = apart(together)
    again, _ = spoken(model, abreast([rows[3], rows[0], rows[1]]), last[[3, 0, 1]], 20)
    assert torch.equal(again, torch.cat([wanted[row][:, 20:] for row in (3, 0, 1)]))
    single, _ = spoken(model, rows[2], last[2:3], 20)
    assert torch.equal(single, wanted[2][:, 20:])
