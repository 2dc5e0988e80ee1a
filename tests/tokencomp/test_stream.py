"""What is held of a clip between its frames, against the same said slowly."""

import torch
from jaxtyping import Int
from torch import Tensor

from mmsdk.tokencomp.stream import Reduced, appended, regrouped
from mmsdk.vision.types import VisualTokens


def run(frames: int, seed: int = 0) -> VisualTokens:
    """So many frames of 2 x 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    n = frames * 6
    positions = torch.cartesian_prod(torch.arange(frames), torch.arange(2), torch.arange(3))
    weight = torch.randint(1, 5, (n,), generator=generator).float()
    features = torch.randn(n, 4, generator=generator)
    return VisualTokens(features, positions, weight, (frames, 2, 3), torch.arange(frames) + 10.0 * seed, torch.rand(n, generator=generator))


def first_half(tokens: VisualTokens, count: int) -> Int[Tensor, " n"]:
    """Pairs of neighbours, as far as the count goes; the rest is dropped."""
    group = torch.arange(len(tokens)) // 2
    return torch.where(group < count, group, -1)


def test_the_second_part_follows_the_first_in_time() -> None:
    joined = appended((run(2),), run(3, seed=1))
    assert joined.grid == (5, 2, 3) and joined.times.tolist() == [0, 1, 10, 11, 12]
    assert torch.equal(joined.positions, torch.cartesian_prod(torch.arange(5), torch.arange(2), torch.arange(3)))


def test_groups_become_their_weighted_means_at_their_first_members() -> None:
    tokens = run(2)
    group = torch.tensor([0, 1, 0, -1, 2, 1, 2, 2, 0, -1, 1, 0])
    left = regrouped(tokens, group, 3)
    for number in range(3):
        members = [i for i in range(12) if int(group[i]) == number]
        total = sum(float(tokens.weight[i]) for i in members)
        mean = sum((tokens.weight[i] * tokens.features[i] for i in members), torch.zeros(4)) / total
        torch.testing.assert_close(left.features[number], mean)
        assert float(left.weight[number]) == total and torch.equal(left.positions[number], tokens.positions[members[0]])
        torch.testing.assert_close(left.saliency[number], sum(tokens.weight[i] * tokens.saliency[i] for i in members) / total)
    assert left.grid == tokens.grid and torch.equal(left.times, tokens.times)


def test_nothing_is_touched_until_more_is_there_than_may_be() -> None:
    start = Reduced(first_half, most=20)
    some = start.push(run(2)).push(run(1, seed=1))
    assert start.tokens == () and torch.equal(some.tokens[0].features, torch.cat([run(2).features, run(1, seed=1).features]))
    more = some.push(run(1, seed=2))
    (held,) = more.tokens
    assert len(held) == 10 and len(some.tokens[0]) == 18 and held.grid == (4, 2, 3)
    torch.testing.assert_close(
        held.features,
        regrouped(appended(some.tokens, run(1, seed=2)), torch.tensor([*range(10)] * 2 + [-1] * 4).sort().values.roll(-4), 10).features,
    )
