"""What is learnt from: episodes that the expert acts in, cut at one VLM update and the two fast steps behind it.

A lesson is a pure function of the recipe's seed and the step, so that a training that goes on after a pause goes on exactly.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.apps.train_memory.student import Eyes, Recipe, Student
from mmsdk.vla.envs.belt import CHUNK, PERIOD, Episodes, Hands, draw, expert, picture
from mmsdk.vla.memory.branches import Branches, branch_loss

__all__ = ["lesson", "loss_of", "shown", "words"]

_LINGER = 4
_ASTRAY = 8
_ANCHORS = torch.tensor([0, 1, 1, 1, 2, 2, 2, 3])
_SPREAD = 4_000_003


def demonstrated(
    episodes: Episodes, steps: int, generator: torch.Generator
) -> tuple[Float[Tensor, "n t p"], Float[Tensor, "n t a"], Bool[Tensor, "n t"]]:
    """States and actions of the expert, and which steps count: those until a little after it has closed.

    Half of the hands are led astray for a few steps after "go", so that the policy learns to arrive late, too.
    """
    hands, states, actions, counts = Hands(episodes), list[Tensor](), list[Tensor](), list[Tensor]()
    since, n = torch.zeros(len(episodes)), len(episodes)
    astray = torch.randint(-_ASTRAY, _ASTRAY, (n,), generator=generator)
    aside = torch.randn(n, 2, generator=generator) * 0.2
    for step in range(steps):
        action = expert(hands)
        states.append(hands.state())
        actions.append(action)
        counts.append(since < _LINGER)
        led = (step >= episodes.go) & (step < episodes.go + astray)
        wrong = torch.cat((action[:, :2] + aside, torch.full((n, 1), -1.0)), dim=1)
        hands.apply(torch.where(led[:, None], wrong, action))
        since = since + (~hands.running).float()
    return torch.stack(states, dim=1), torch.stack(actions, dim=1), torch.stack(counts, dim=1)


def shown(eyes: Eyes, episodes: Episodes, step: int) -> Float[Tensor, "n m d"]:
    """The visual tokens of a moment."""
    return eyes.see(picture(episodes, step)[:, None])


def lesson(student: Student, recipe: Recipe, step: int) -> tuple[Branches, torch.Generator]:
    """The branches of one training step, and the generator to go on drawing with."""
    generator = torch.Generator().manual_seed(_SPREAD * (recipe.seed + 1) + step)
    anchor = int(_ANCHORS[torch.randint(len(_ANCHORS), (1,), generator=generator)])
    rows, decisions = recipe.rows, PERIOD // CHUNK
    # "go" is mostly drawn where it matters to this anchor: in its period or one decision before
    near = anchor * decisions + torch.randint(-1, decisions, (rows,), generator=generator)
    anywhere = torch.randint(decisions, 3 * decisions, (rows,), generator=generator)
    far = (torch.rand(rows, generator=generator) < 0.2) | (near < decisions) | (near >= 3 * decisions)
    tasks = torch.rand(rows, generator=generator) < 0.5
    episodes = draw(tasks, generator, CHUNK * torch.where(far, anywhere, near))
    states, actions, counts = demonstrated(episodes, (anchor + 1) * PERIOD, generator)
    first = anchor * PERIOD
    moments = [*range(0, first + 1, PERIOD), *range(first + CHUNK, first + PERIOD, CHUNK)]
    sight = torch.stack([shown(student.eyes, episodes, moment) for moment in moments], dim=1)
    starts = torch.arange(first, first + PERIOD, CHUNK)
    window = starts[:, None] + torch.arange(CHUNK)
    ids, said = words(tasks)
    branches = Branches(
        sight,
        torch.ones(rows, len(moments), 1, dtype=torch.bool),
        torch.ones(rows, anchor + 1, dtype=torch.bool),
        ids,
        said,
        states[:, starts],
        actions[:, window],
        counts[:, window],
        tuple(CHUNK * number / PERIOD for number in range(1, decisions)),
    )
    return branches, generator


def words(tasks: Bool[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """The instruction: "pick it" or "pick the one that was shown", two tokens each."""
    ids = torch.stack((torch.ones_like(tasks, dtype=torch.long), 2 + tasks.long()), dim=1)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def loss_of(student: Student, recipe: Recipe, step: int) -> Float[Tensor, ""]:
    """The loss of one training step."""
    seen, generator = lesson(student, recipe, step)
    noise = torch.randn(seen.actions.shape, generator=generator)
    times = torch.rand(seen.actions.shape[:2], generator=generator) ** (1 / 1.5) * 0.999 + 0.001
    return branch_loss(student.decoder, student.refiner, student.expert, recipe.memory, seen, noise, times)
