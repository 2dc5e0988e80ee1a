"""Sampled teams against exact attention: expectations over all draws, sizes, and what is always read."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.attention.mask import Masks
from mmsdk.decoder.asking import Asking
from mmsdk.decoder.rope import Rope, Unscaled
from mmsdk.errors import BudgetError
from mmsdk.kernels.ops.block_gather import block_gather
from mmsdk.kv.blocked import blocked, folded
from mmsdk.kv.entries import Arriving, Entries
from mmsdk.kv.policies.santa import Santa, Share, drawn, inclusion, likely, uniforms
from mmsdk.kv.shelf import attended

ROWS, HEADS, KV_HEADS, WIDTH, TEAM = 2, 4, 2, 8, 4


def memory(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A query, keys and values in teams of four, and what is real: the last team may be partial."""
    generator = torch.Generator().manual_seed(seed)
    teams = -(-tokens // TEAM)
    query = torch.randn(ROWS, HEADS, WIDTH, generator=generator) * 2
    keys, values = (torch.randn(ROWS, KV_HEADS, teams, TEAM, WIDTH, generator=generator) for _ in range(2))
    valid = (torch.arange(teams * TEAM) < tokens).view(1, teams, TEAM).expand(ROWS, -1, -1)
    return query, keys, values, valid


def exact(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """log den and num / den, in float64."""
    k, v = (x.double().flatten(2, 3).repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    scores = (k @ query.double()[..., None])[..., 0] * WIDTH**-0.5
    scores = scores.masked_fill(~valid.flatten(1)[:, None], -torch.inf)
    return scores.logsumexp(-1), (scores.softmax(-1)[..., None] * v).sum(2)


def sampled(
    parts: tuple[Tensor, Tensor, Tensor, Tensor], teams: int, uniform: Tensor, share: Share = "max"
) -> tuple[Tensor, Tensor, Tensor]:
    """What the draw of `uniform` [b g] gives: output, lse, and the teams."""
    query, keys, values, valid = parts
    sizes, draws = valid.sum(2), torch.tensor(teams)
    latest = torch.zeros_like(sizes, dtype=torch.bool)
    latest[:, 0] = latest[:, -1] = True
    sums = keys.masked_fill(~valid[:, None, ..., None], 0).sum(3)
    chances = inclusion(likely(query, sums, sizes, share), latest[:, None].expand(-1, KV_HEADS, -1), draws)
    index = drawn(chances, uniform, draws, teams)
    bias = -chances.gather(2, index.clamp_min(0)).log().float()
    flat = keys.flatten(2, 3), values.flatten(2, 3), index, bias, valid.flatten(1), torch.zeros(len(query), dtype=torch.long)
    return *block_gather(query, *flat, TEAM, WIDTH**-0.5), index


def flat(share: float) -> Tensor:
    return torch.full((ROWS, KV_HEADS), share, dtype=torch.float64)


@pytest.mark.parametrize("share", ["max", "mean"])
@pytest.mark.parametrize("teams", [10, 11, 40])
def test_as_many_draws_as_teams_are_exact(teams: int, share: Share) -> None:
    parts = memory(38)
    out, lse, index = sampled(parts, teams, flat(0.3), share)
    true_lse, true_out = exact(*parts)
    torch.testing.assert_close(out.double(), true_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-5)
    assert all(sorted(row) == list(range(10)) for row in index.flatten(0, 1).tolist())


@pytest.mark.parametrize("share", ["max", "mean"])
def test_numerator_and_denominator_have_the_expectations_of_exact_attention(share: Share) -> None:
    """Over a fine grid of the one number that a draw depends on, which is the expectation itself but for the grid."""
    parts, steps = memory(38), 4000
    true_lse, true_out = exact(*parts)
    many = [x.repeat_interleave(steps, 0) for x in parts]
    grid = ((torch.arange(steps, dtype=torch.float64) + 0.5) / steps).repeat(ROWS)[:, None].expand(-1, KV_HEADS)
    out, lse, _ = sampled((many[0], many[1], many[2], many[3]), 4, grid, share)
    den = (lse.double().unflatten(0, (ROWS, steps)) - true_lse[:, None]).exp()
    num = den[..., None] * out.double().unflatten(0, (ROWS, steps))
    torch.testing.assert_close(den.mean(1), torch.ones_like(true_lse), rtol=0, atol=0.01)
    torch.testing.assert_close(num.mean(1), true_out, rtol=0, atol=0.01)
    assert den.std(1).min() > 0.01


def test_the_error_falls_with_the_number_of_draws() -> None:
    parts, steps = memory(256), 100
    true = exact(*parts)[1]
    many = [x.repeat_interleave(steps, 0) for x in parts]
    grid = ((torch.arange(steps, dtype=torch.float64) + 0.5) / steps).repeat(ROWS)[:, None].expand(-1, KV_HEADS)
    errors = []
    for teams in (8, 16, 32):
        out = sampled((many[0], many[1], many[2], many[3]), teams, grid)[0]
        errors.append(float((out.double() - true.repeat_interleave(steps, 0)).square().mean()))
    assert errors[0] > 1.5 * errors[1] and errors[1] > 1.5 * errors[2]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(3, 20), st.floats(0, 8), st.integers(0, 2), st.integers(0, 1000))
def test_chances_are_capped_shares_that_sum_to_the_draws(n: int, teams: int, spread: float, always: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(n, generator=generator) * spread
    sure = torch.arange(n) < always
    chances = inclusion(weights, sure, torch.tensor(teams))
    assert (chances[:always] == 1).all() and (chances <= 1).all() and (chances > 0).all()
    assert float(chances.sum()) == pytest.approx(min(teams, n), rel=1e-9)
    # an independent solution: cap the largest until no share exceeds 1
    capped, size = set(torch.where(sure)[0].tolist()), weights.double().exp()
    while True:
        rest = [i for i in range(n) if i not in capped]
        c = (teams - len(capped)) / sum(float(size[i]) for i in rest) if rest else 0.0
        more = {i for i in rest if c * float(size[i]) >= 1}
        if not more:
            break
        capped |= more
    expected = torch.tensor([1.0 if i in capped else c * float(size[i]) for i in range(n)], dtype=torch.float64)
    torch.testing.assert_close(chances, expected, rtol=1e-6, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0, 12.0), st.floats(0, 0.999), st.integers(0, 1000))
def test_the_realised_size_is_the_floor_or_the_ceiling(teams: float, uniform: float, seed: int) -> None:
    weights = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed))
    chances = inclusion(weights, torch.zeros(3, 20, dtype=torch.bool), torch.tensor(teams, dtype=torch.float64))
    index = drawn(chances, torch.full((3,), uniform, dtype=torch.float64), torch.tensor(teams, dtype=torch.float64), math.ceil(teams))
    assert index.shape[1] == math.ceil(teams)
    for row in index.tolist():
        real = [team for team in row if team >= 0]
        assert len(set(real)) == len(real) and len(real) in (math.floor(teams), math.ceil(teams))


def test_each_team_is_drawn_as_often_as_its_chance_says() -> None:
    chances = inclusion(torch.randn(12, generator=torch.Generator().manual_seed(3)), torch.zeros(12, dtype=torch.bool), torch.tensor(5))
    grid = torch.arange(2000, dtype=torch.float64) / 2000
    index = drawn(chances.expand(2000, -1), grid, torch.tensor(5), 5)
    often = torch.bincount(index[index >= 0], minlength=12) / 2000
    torch.testing.assert_close(often.double(), chances, rtol=0, atol=2e-3)


def test_teams_without_tokens_are_never_drawn_and_rows_without_any_are_silent() -> None:
    weights = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf], [-torch.inf] * 4])
    always = torch.tensor([[True, True, False, False]] * 2)
    chances = inclusion(weights, always, torch.tensor(3))
    assert chances.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    index = drawn(chances, torch.tensor([0.9, 0.9], dtype=torch.float64), torch.tensor(3), 3)
    assert sorted(index[0].tolist()) == [-1, 0, 2] and index[1].tolist() == [-1] * 3


def test_the_same_seed_draws_the_same_whatever_the_batch_and_others_differ() -> None:
    positions = torch.tensor([5, 700, 5])
    found = uniforms(7, 3, 4, positions)
    assert torch.equal(found, uniforms(7, 3, 4, positions)) and torch.equal(found[0], found[2])
    assert torch.equal(uniforms(7, 3, 4, positions[1:2])[0], found[1])
    many = torch.cat([uniforms(seed, layer, 4, torch.arange(500)) for seed, layer in ((0, 0), (0, 1), (1, 0))])
    assert (many >= 0).all() and (many < 1).all() and len(many.unique()) > 0.99 * many.numel()
    assert float(many.mean()) == pytest.approx(0.5, abs=0.02) and float(many.var()) == pytest.approx(1 / 12, abs=0.005)


def test_splitmix64_is_the_published_sequence() -> None:
    """The first numbers from seed 1234567 of the generator's reference implementation."""
    from mmsdk.kv.policies import santa

    first = santa._mixed(torch.tensor(1234567))
    assert int(first) % 2**64 == 6457827717110365317


def asking(positions: Tensor) -> Asking:
    """What a decoder lends for new tokens at these positions."""
    return Asking(Dense(), Masks(positions, torch.float32, None), Rope(WIDTH, 1e4, Unscaled())(positions, torch.float32))


def held(tokens: int, padding: int) -> Entries:
    """Two rows of tokens, the second with padding in front, in one layer's entries."""
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.stack((torch.arange(tokens), torch.arange(tokens) - padding)).clamp_min(-1)
    entries = Entries(0, 1)
    keys, values = (torch.randn(2, KV_HEADS, tokens, WIDTH, generator=generator) for _ in range(2))
    entries.append(Arriving.of(positions, torch.zeros(2, dtype=torch.long)), keys, values)
    return entries


@pytest.mark.parametrize("tokens", [3, 38, 40])
def test_a_budget_for_all_teams_reads_as_exact_attention_does_padding_or_not(tokens: int) -> None:
    entries, query = held(tokens, 2), torch.randn(2, HEADS, 1, WIDTH)
    ask = asking(torch.tensor([[tokens - 1], [tokens - 3]]))
    exactly = attended(query, entries, ask)
    torch.testing.assert_close(Santa(team=TEAM).read(query, entries, ask, torch.tensor([tokens, tokens])), exactly, rtol=1e-5, atol=1e-5)


def test_a_small_budget_reads_less_repeats_itself_and_differs_by_seed() -> None:
    entries, query, ask = held(203, 30), torch.randn(2, HEADS, 1, WIDTH), asking(torch.tensor([[202], [172]]))
    keep, policy = torch.tensor([40, 34]), Santa(team=TEAM, recent=TEAM)
    first = policy.read(query, entries, ask, keep)
    assert entries.read == 2 * KV_HEADS * (10 * TEAM + 51 // 2)
    assert torch.equal(first, policy.read(query, entries, ask, keep))
    assert not torch.equal(first, Santa(team=TEAM, recent=TEAM, seed=1).read(query, entries, ask, keep))
    for row in range(2):
        alone = policy.read(
            query[row : row + 1], entries.select(torch.tensor([row])), asking(ask.positions[row : row + 1]), keep[row : row + 1]
        )
        torch.testing.assert_close(alone, first[row : row + 1])


def test_sums_follow_the_tokens_that_come_later_from_each_rows_first_one_on() -> None:
    entries, query = held(10, 3), torch.randn(2, HEADS, 1, WIDTH)
    policy = Santa(team=TEAM, recent=1)
    for place in range(10, 90):
        new = torch.tensor([[place], [place - 3]])
        entries.append(Arriving.of(new, new[:, 0]), *(torch.randn(2, KV_HEADS, 1, WIDTH) for _ in range(2)))
        policy.read(query, entries, asking(new), torch.tensor([8, 8]))
    sums = folded(blocked(entries, TEAM), "sum", 0.0)
    torch.testing.assert_close(sums[0, :, :22], entries.keys[0, :, :88].unflatten(1, (22, TEAM)).sum(2))
    torch.testing.assert_close(sums[1, :, :21], entries.keys[1, :, 3:87].unflatten(1, (21, TEAM)).sum(2))
    torch.testing.assert_close(sums[1, :, 21], entries.keys[1, :, 87:].sum(1))


def test_the_teams_of_the_first_and_the_last_tokens_are_always_in() -> None:
    """All values are 0 but those: with equal keys the weight of what is always read is its share of the tokens, in every draw."""
    entries = Entries(0, 1)
    values = torch.zeros(1, 1, 64, 2)
    values[:, :, :4, 0], values[:, :, 60:, 1] = 1, 1
    entries.append(Arriving.of(torch.arange(64)[None], torch.zeros(1, dtype=torch.long)), torch.zeros(1, 1, 64, 2), values)
    for seed in range(20):
        out = Santa(team=TEAM, recent=2, seed=seed).read(torch.randn(1, 1, 1, 2), entries, asking(torch.tensor([[63]])), torch.tensor([16]))
        assert (out > 0).all()


def test_teams_have_a_token_at_least() -> None:
    with pytest.raises(BudgetError, match="team=0"):
        Santa(team=0)


def test_a_layer_with_a_window_of_its_own_sees_that_and_no_more() -> None:
    """As in Gemma 3, whose local layers see the last positions alone."""
    entries, query = held(100, 0), torch.randn(2, HEADS, 1, WIDTH)
    ask = asking(torch.full((2, 1), 99))
    local = Asking(Dense(), Masks(ask.positions, torch.float32, None, window=5), ask.rotation)
    out = Santa(team=TEAM, recent=1).read(query, entries, local, torch.tensor([16, 16]))
    entries.values[:, :, :95] += 7
    torch.testing.assert_close(Santa(team=TEAM, recent=1).read(query, entries, local, torch.tensor([16, 16])), out)
