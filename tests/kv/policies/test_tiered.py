"""Three levels against attention to what each of them holds, token by token."""

import pytest
import torch
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import BudgetError, InputError
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.merging import Means
from mmsdk.kv.policies.tiered import Tiered
from mmsdk.kv.shelf import attended
from mmsdk.kv.tiers import Tiers, capacity, recalled

ROWS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8
SMALL = Tiered(block=4, sinks=2, interval=4)


def asking(positions: Tensor) -> Asking:
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(WIDTH, 1e4, Unscaled())(positions, torch.float32))


def drawn(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two rows."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(ROWS, HEADS, tokens, WIDTH, generator=generator)
    return query, *(torch.randn(ROWS, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))


def places(start: int, stop: int, blank: int) -> Tensor:
    return torch.stack((torch.arange(start, stop), torch.arange(start, stop) - blank)).clamp_min(-1)


def told(store: Tiers, policy_tokens: tuple[Tensor, Tensor, Tensor], start: int, stop: int, blank: int = 0) -> Tensor:
    """Give the store these tokens in one pass; what they get."""
    query, keys, values = (x[:, :, start:stop] for x in policy_tokens)
    at = places(start, stop, blank)
    store.append(Arriving.of(at, at[:, 0].clamp_min(0)), keys, values)
    return store.attend(query, asking(at))


def prompted(policy: Tiered, amount: int | float, tokens: tuple[Tensor, Tensor, Tensor], length: int, blank: int = 0) -> Tiers:
    store = policy.store(0, 1, amount)
    told(store, tokens, 0, length, blank)
    store.settle()
    return store


def test_a_prompt_within_the_budget_stays_exact_and_so_is_what_follows_until_it_is_not() -> None:
    tokens, plain = drawn(40), Entries(0, 1)
    store = prompted(SMALL, 30, tokens, 24, blank=5)
    plain.append(Arriving.of(places(0, 24, 5), torch.zeros(2, dtype=torch.long)), *(x[:, :, :24] for x in tokens[1:]))
    for step in range(24, 28):
        out, at = told(store, tokens, step, step + 1, 5), places(step, step + 1, 5)
        plain.append(Arriving.of(at, at[:, 0]), *(x[:, :, step : step + 1] for x in tokens[1:]))
        torch.testing.assert_close(out, attended(tokens[0][:, :, step : step + 1], plain, asking(at)))
    assert store.lengths.flatten().tolist() == [28, 23]


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("recall", [0.4, 1.0])
def test_the_output_is_attention_to_all_levels(recall: float, s: int) -> None:
    """Written out: exact tokens once, means as many tokens as they stand for, recalled blocks in place of their means."""
    policy, tokens = Tiered(block=4, sinks=2, interval=4, mid=0.4, recall=recall), drawn(200)
    store = prompted(policy, 80, tokens, 150, blank=9)
    out = told(store, tokens, 150, 150 + s, 9)
    query, keys, values = (x.double() for x in tokens)
    sizes = policy.sizes(80)
    mid, far, window = store._mids[0], store._far, 150 - sizes.window
    low = window - 4 * sizes.mid
    assert mid.count == sizes.mid and sizes.mid >= 5
    for row, blank in ((0, 0), (1, 9)):
        for head in range(HEADS):
            for new in range(s):
                group = head // 2
                asked = query[row, 2 * group : 2 * group + 2, 150 : 150 + s].flatten(0, 1)
                weights = (asked @ torch.cat([x.keys[row, group] for x in (mid, *far)]).double().T) * WIDTH**-0.5
                weights = (weights + torch.cat([x.sizes[row] for x in (mid, *far)]).log())[:, : sizes.mid].log_softmax(1).amax(0)
                chosen = weights.topk(sizes.recalled).indices.tolist()
                exact = [blank, blank + 1, *range(window, 151 + new)] + [low + 4 * i + j for i in chosen for j in range(4)]
                k, v, n = [keys[row, group, exact]], [values[row, group, exact]], [torch.ones(len(exact))]
                left = [i for i in range(sizes.mid) if i not in chosen]
                for level, part in ((mid, left), *((one, list(range(one.count))) for one in far)):
                    k.append(level.keys[row, group, part].double())
                    v.append(level.values[row, group, part].double())
                    n.append(level.sizes[row, part])
                scores = torch.cat(k) @ query[row, head, 150 + new] * WIDTH**-0.5 + torch.cat(n).double().log()
                torch.testing.assert_close(out[row, head, new].double(), scores.softmax(0) @ torch.cat(v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", ["mid", "far"])
def test_a_needle_amid_hay_is_found_where_originals_are_kept_and_in_a_mean_it_is_not(level: str) -> None:
    """A key along the query of one head; wherever in the middle it lies, its block is recalled, and its value is what that head gets."""
    policy, tokens = Tiered(block=4, sinks=2, interval=4, mid=0.5), drawn(201)
    sizes = policy.sizes(100)
    window = 200 - sizes.window
    low = window - 4 * sizes.mid
    assert sizes.mid == 10 and sizes.recalled == 2 and low > 40
    for place in range(low, window) if level == "mid" else range(low - 32, low):
        query, keys, values = (x.clone() for x in tokens)
        asked = query[0, 2, 200]
        keys[0, 1, place], values[0, 1, place] = 14 * asked / asked.norm() * WIDTH**0.5 / asked.norm(), 50.0
        store = prompted(policy, 100, (query, keys, values), 200)
        out = told(store, (query, keys, values), 200, 201)
        assert (out[0, 2] > 49).all() if level == "mid" else (out[0, 2] < 25).all()
        # other heads and rows have no part in it
        assert (out[1] < 5).all() and (out[0, :2] < 5).all()


def test_every_token_is_in_one_place_and_older_is_coarser() -> None:
    tokens = drawn(400)
    store = prompted(SMALL, 40, tokens, 301, blank=6)
    for step in range(301, 400):
        told(store, tokens, step, step + 1, 6)
        exact = store._entries.lengths[:, 0] - 4 * store._mid
        assert (exact + sum(means.sizes.sum(1) for means in store._means)).tolist() == [step + 1, step - 5]
    rates = [int(means.sizes.max()) for means in store._far if means.count]
    assert rates[:-1] == [4 * 2**level for level in range(len(rates) - 1)] and len(rates) > 3
    latest = [means.positions[0].max().item() for means in store._far if means.count]
    assert latest == sorted(latest, reverse=True)
    # the mean of all means is the mean of all tokens
    whole = torch.cat((store._means[0].values * store._means[0].sizes[:, None, :, None], store._entries.values), 2)
    exact_mid = store._entries.values[:, :, store._first : store._first + 4 * store._mid].sum(2)
    blind = ~store._entries.valid[:, 0]
    whole[:, :, store._means[0].count :] = whole[:, :, store._means[0].count :].masked_fill(blind[:, None, :, None], 0)
    values = tokens[2].clone()
    values[1, :, :6] = 0
    torch.testing.assert_close(whole.sum(2) - exact_mid, values.sum(2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("amount", [24, 60, 0.2])
def test_the_budget_holds_and_memory_is_freed(amount: int | float) -> None:
    tokens = drawn(400)
    store = prompted(SMALL, amount, tokens, 300)
    keep = amount if isinstance(amount, int) else 60
    assert (store.lengths <= keep).all() and (store.lengths > keep // 2).all()
    most = 0
    for step in range(300, 400):
        told(store, tokens, step, step + 1)
        most = max(most, int(store.lengths.max()))
        assert store.read_bytes <= ROWS * KV_HEADS * (keep + SMALL.interval + 6) * 2 * WIDTH * 4
    assert most <= keep + SMALL.interval + 4
    assert store.span <= ROWS * KV_HEADS * (keep + 40) and store.nbytes < 0.45 * 2 * ROWS * KV_HEADS * 300 * WIDTH * 4


def test_an_endless_row_is_remembered_in_as_many_means_as_the_budget_says() -> None:
    """The last level takes in all that is older, each token by as much as any other."""
    tokens = drawn(1000)
    store = prompted(SMALL, 24, tokens, 30)
    for start in range(30, 998, 4):
        told(store, tokens, start, start + 4)
        assert sum(means.count for means in store._far) <= 24 * SMALL.far + len(store._far)
    (means,) = store._means
    assert int(means.sizes[0].sum()) + int(store._entries.lengths[0]) - 4 * store._mid == 998
    oldest = store._far[-1]
    size = int(oldest.sizes[0, 0])
    torch.testing.assert_close(oldest.values[:, :, 0], tokens[2][:, :, 2 : 2 + size].mean(2), rtol=1e-3, atol=1e-4)


def test_a_layer_with_a_window_of_its_own_keeps_what_it_sees_exactly() -> None:
    x, store, plain = drawn(80), SMALL.store(0, 1, 20), Entries(0, 1)
    for start, stop in ((0, 70), *((step, step + 1) for step in range(70, 80))):
        at = places(start, stop, 0)
        local = Asking(Dense(), Masks(at, torch.float32, None, window=40), asking(at).rotation)
        for held in (store, plain):
            held.append(Arriving.of(at, at[:, 0]), x[1][:, :, start:stop], x[2][:, :, start:stop])
        torch.testing.assert_close(store.attend(x[0][:, :, start:stop], local), attended(x[0][:, :, start:stop], plain, local))
        store.settle()


def test_blocks_are_recalled_by_the_largest_share_of_any_query() -> None:
    found = torch.tensor([[[[0.0, 5.0, 1.0, 9.0], [8.0, 0.0, 0.0, 0.0]]]])
    assert sorted(recalled(found, torch.tensor([[4, 4, 4, 0]]), 2)[0, 0].tolist()) == [0, 1]


@pytest.mark.parametrize(("means", "blocks", "each"), [(8, 8, 8), (8, 9, 4), (9, 21, 3), (2, 50, 1), (1, 1, 1)])
def test_levels_are_as_few_as_hold_all_blocks(means: int, blocks: int, each: int) -> None:
    assert capacity(means, blocks) == each


def test_selected_rows_lose_padding_and_nothing_else() -> None:
    """The padding of a short row reaches into the middle level, where it cuts a block."""
    policy, tokens = Tiered(block=4, sinks=2, interval=4, mid=0.5, far=0.1), drawn(120)
    store = prompted(policy, 60, tokens, 100, blank=61)
    alone = store.select(torch.tensor([1]))
    both = told(store, tokens, 100, 101, 61)
    assert alone._entries.count < store._entries.count
    query, keys, values = (x[1:2, :, 100:101] for x in tokens)
    at = torch.tensor([[39]])
    alone.append(Arriving.of(at, at[:, 0]), keys, values)
    torch.testing.assert_close(alone.attend(query, asking(at)), both[1:2], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_told() -> None:
    for wrong in ({"block": 0}, {"mid": 0.6, "far": 0.4}, {"interval": 8}, {"recall": 1.5}):
        with pytest.raises(BudgetError, match="tiered"):
            Tiered(**wrong)
    with pytest.raises(InputError, match="levels decide"):
        prompted(SMALL, 20, drawn(30), 30).keep(torch.zeros(2, 1, dtype=torch.long))


def test_means_are_of_the_tokens_they_stand_for() -> None:
    tokens = drawn(100)
    store = prompted(SMALL, 40, tokens, 100)
    newest: Means = store._far[0]
    sizes = SMALL.sizes(40)
    stop = 100 - sizes.window - 4 * sizes.mid
    torch.testing.assert_close(newest.keys[:, :, -1], tokens[1][:, :, stop - 4 : stop].mean(2))
    assert newest.positions[0, -1] == stop - 1
