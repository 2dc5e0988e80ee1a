"""Training sees what acting sees: the branches' contexts equal the memory's, and gradients go where the paper lets them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.selection import BlockLayout, Selection
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.memory.branches import Branches, branch_loss, prefixes, together
from mmsdk.vla.memory.dual import Ablation, DualMemory, MemoryConfig
from mmsdk.vla.memory.expert import DualConfig, DualExpert
from mmsdk.vla.memory.refine import Refiner, RefinerConfig

Fill = Callable[[nn.Module, int], dict[str, Tensor]]
Moment = tuple[Tensor, Tensor, Tensor, Tensor]
FULL = Selection(ratio=1.0)


@pytest.fixture
def refiner(decoder: Decoder, layout: BlockLayout, fill: Fill) -> Refiner:
    made = Refiner(decoder.config, layout, RefinerConfig(sight=32, width=16, layers=1, heads=2, inner=24, queries=3))
    made.load_state_dict(fill(made, 4))
    return made


@pytest.fixture
def expert(fill: Fill) -> DualExpert:
    made = DualExpert(DualConfig(ExpertConfig(16, 3, 4, 2, 8, 24), chunk=4, action_dim=3, state_dim=5))
    made.load_state_dict(fill(made, 5))
    return made


def branches(moments: list[Moment], blocks: int, known: Tensor) -> Branches:
    """`blocks` slow moments, then two fast ones; the words are the first moment's."""
    sight = torch.stack([moment[0] for moment in moments[: blocks + 2]], dim=1)
    present = torch.stack([moment[1] for moment in moments[: blocks + 2]], dim=1)
    steps = torch.tensor([[[True] * 4, [True] * 4, [True, True, False, False]], [[True] * 4, [False] * 4, [False] * 4]])
    return Branches(sight, present, known, *moments[0][2:], noise_of(20, (2, 3, 5)), noise_of(21, (2, 3, 4, 3)), steps, (1 / 3, 2 / 3))


@pytest.mark.parametrize("condition", ["none", "slow", "fast", "dual"])
def test_contexts_of_training_are_those_of_acting(condition: Ablation, decoder: Decoder, refiner: Refiner, moments: list[Moment]) -> None:
    config = MemoryConfig(period=75.0, selection=FULL).ablated(condition)
    seen = branches(moments, 3, torch.ones(2, 3, dtype=torch.bool))
    with torch.no_grad():
        found = prefixes(decoder, refiner, config, seen)
    memory = DualMemory(decoder, refiner, config)
    turns = [memory.slow(75.0 * number, *moments[number][:2], *moments[0][2:]) for number in range(3)][-1:]
    turns += [memory.fast(150.0 + 25 * number, *moments[2 + number][:2]) for number in (1, 2)]
    for context, turn in zip(found, turns, strict=True):
        for layer in range(3):
            torch.testing.assert_close(context.cache.view(layer).keys, turn.context.cache.view(layer).keys, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(context.cache.view(layer).values, turn.context.cache.view(layer).values, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("known", [((True, True, True), (True, True, True)), ((True, True, True), (False, False, True))])
@pytest.mark.parametrize(("slow", "fast"), [(4, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("refine", [True, False])
def test_contexts_made_together_are_those_made_one_after_the_other(
    refine: bool, slow: int, fast: int, known: tuple[tuple[bool, ...], ...], decoder: Decoder, refiner: Refiner, moments: list[Moment]
) -> None:
    config, seen = MemoryConfig(75.0, slow, fast, refine, FULL), branches(moments, 3, torch.tensor(known))
    with torch.no_grad():
        found, expected = together(decoder, refiner, config, seen), prefixes(decoder, refiner, config, seen)
    for number, context in enumerate(expected):
        for layer in range(3):
            mine, theirs = found.cache.view(layer), context.cache.view(layer)
            for row in range(2):
                at, there = mine.valid[2 * number + row], theirs.valid[row]
                torch.testing.assert_close(mine.keys[2 * number + row][:, at], theirs.keys[row][:, there], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(mine.values[2 * number + row][:, at], theirs.values[row][:, there], atol=1e-5, rtol=1e-5)


def test_a_row_without_history_learns_as_if_it_were_alone(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    config, noise, times = MemoryConfig(selection=FULL), noise_of(30, (2, 3, 4, 3)), torch.rand(2, 3)
    padded = branches(moments, 2, torch.tensor([[False, True], [False, True]]))
    short = replace(padded, sight=padded.sight[:, 1:], present=padded.present[:, 1:], known=padded.known[:, 1:])
    torch.testing.assert_close(
        branch_loss(decoder, refiner, expert, config, padded, noise, times),
        branch_loss(decoder, refiner, expert, config, short, noise, times),
    )


def test_the_loss_is_the_mean_over_steps_that_count(decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]) -> None:
    config, noise, times = MemoryConfig(selection=FULL), noise_of(30, (2, 3, 4, 3)), torch.rand(2, 3)
    seen = branches(moments, 2, torch.ones(2, 2, dtype=torch.bool))
    total, count = 0.0, 0
    with torch.no_grad():
        found = branch_loss(decoder, refiner, expert, config, seen, noise, times)
        for e, context in enumerate(prefixes(decoder, refiner, config, seen)):
            t = times[:, e, None]
            x = t[..., None] * noise[:, e] + (1 - t[..., None]) * seen.actions[:, e]
            error = (expert.velocity(context, seen.state[:, e])(x, t) - (noise[:, e] - seen.actions[:, e])).square().mean(-1)
            for row in range(2):
                for step in range(4):
                    if seen.steps[row, e, step]:
                        total, count = total + float(error[row, step]), count + 1
    assert count == 14
    torch.testing.assert_close(float(found), total / count, atol=1e-5, rtol=1e-5)


def test_gradients_reach_the_slow_path_and_stop_at_fresh_sight(
    decoder: Decoder, refiner: Refiner, expert: DualExpert, moments: list[Moment]
) -> None:
    seen = branches(moments, 2, torch.ones(2, 2, dtype=torch.bool))
    seen = replace(seen, steps=torch.ones_like(seen.steps), sight=seen.sight.clone().requires_grad_())
    config, noise = MemoryConfig(selection=FULL), noise_of(30, (2, 3, 4, 3))
    decoder.requires_grad_()
    decoder.zero_grad()
    branch_loss(decoder, refiner, expert, config, seen, noise, torch.rand(2, 3) * 0.9 + 0.05).backward()
    assert seen.sight.grad is not None
    reached = [bool(seen.sight.grad[:, number].abs().sum() > 0) for number in range(4)]
    assert reached == [True, True, False, False]
    for module in (refiner, expert):
        assert all(parameter.grad is not None and float(parameter.grad.abs().sum()) > 0 for parameter in module.parameters())
    # of the last layer only keys and values are read
    unread = ("layers.2.attention.o", "layers.2.mlp", "layers.2.norm2", "norm.weight", "head")
    for name, parameter in decoder.named_parameters():
        if not name.startswith(unread):
            assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name
    decoder.requires_grad_(False)


def test_branches_that_do_not_match_are_refused(moments: list[Moment]) -> None:
    with pytest.raises(InputError, match="4 moments and 3 targets of 3 blocks and 2 branches; expected 5 and 3"):
        branches(moments[:4], 2, torch.ones(2, 3, dtype=torch.bool))
