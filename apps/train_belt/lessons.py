"""What is learnt from: demonstrations cut at one VLM update, the updates before it, and the two fast steps behind it.

A lesson is a pure function of the recipe's seed and the step, so that a training that goes on after a pause goes on exactly. An episode may
be cut as if it had begun up to two decisions later, while the lamp is still lit: each gives three times as many lessons.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.apps.train_belt.eyes import Eyes
from mmsdk.apps.train_belt.student import Recipe, Student, words
from mmsdk.errors import InputError
from mmsdk.vla.envs.belt import CHUNK, LIMIT, PERIOD
from mmsdk.vla.memory.branches import Branches, branch_loss

__all__ = ["Lessons"]

_PACE = PERIOD // CHUNK
_ANCHORS = torch.tensor([1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9])
_AROUND = (-2, 3)
_AGREE = 0.85
_SPREAD = 4_000_003


@dataclass(frozen=True, slots=True)
class Lessons:
    """Demonstrations as the eyes see them: decisions e of each episode n, steps t."""

    found: Float[Tensor, "n e k f"]
    states: Float[Tensor, "n t p"]
    actions: Float[Tensor, "n t a"]
    counts: Bool[Tensor, "n t"]
    go: Int[Tensor, " n"]
    cued: Bool[Tensor, " n"]

    def __post_init__(self) -> None:
        if self.states.shape[1] != LIMIT or self.found.shape[1] != LIMIT // CHUNK:
            told = f"{self.states.shape[1]} steps and {self.found.shape[1]} decisions"
            raise InputError(f"{told} an episode; expected {LIMIT} and {LIMIT // CHUNK}", item="demonstrations")

    @staticmethod
    def of(data: dict[str, Tensor], eyes: Eyes) -> "Lessons":
        """Demonstrations of `gather`, looked at once."""
        found = [eyes.features(pictures.float() / 127.5 - 1) for pictures in data["pictures"].flatten(0, 1).split(256)]
        seen = torch.cat(found).unflatten(0, data["pictures"].shape[:2])
        return Lessons(seen, data["states"], data["actions"], data["counts"], data["go"], data["cued"])

    def loss(self, student: Student, recipe: Recipe, step: int) -> Float[Tensor, ""]:
        """The loss of one training step."""
        generator = torch.Generator().manual_seed(_SPREAD * (recipe.seed + 1) + step)
        seen = self.branches(student, recipe, generator)
        noise = torch.randn(seen.actions.shape, generator=generator)
        times = torch.rand(seen.actions.shape[:2], generator=generator) ** (1 / 1.5) * 0.999 + 0.001
        return branch_loss(student.decoder, student.refiner, student.expert, recipe.memory, seen, noise, times)

    def branches(self, student: Student, recipe: Recipe, generator: torch.Generator) -> Branches:
        """As many episodes as the recipe's rows, all cut at one anchor, most of them released about then."""
        anchor = int(_ANCHORS[torch.randint(len(_ANCHORS), (1,), generator=generator)])
        chosen = self._episodes(anchor, recipe.rows, generator)
        # a memory of one block never sees the updates before the anchor
        updates = [*range(anchor % _PACE, anchor + 1, _PACE)][-recipe.memory.slow :]
        moments = [*updates, *range(anchor + 1, anchor + _PACE)]
        starts = CHUNK * torch.arange(anchor, anchor + _PACE)
        window = starts[:, None] + torch.arange(CHUNK)
        ids, said = words(self.cued[chosen])
        return Branches(
            student.places(self.found[chosen[:, None], torch.tensor(moments)]),
            torch.ones(recipe.rows, len(moments), 1, dtype=torch.bool),
            torch.ones(recipe.rows, len(updates), dtype=torch.bool),
            ids,
            said,
            student.felt(self.states[chosen[:, None], starts]),
            student.wanted(self.actions[chosen[:, None, None], window]),
            self.counts[chosen[:, None, None], window],
            tuple(CHUNK * number / PERIOD for number in range(1, _PACE)),
        )

    def _episodes(self, anchor: int, rows: int, generator: torch.Generator) -> Int[Tensor, " r"]:
        """Where there are episodes released about the anchor, most are of these."""
        offset = self.go // CHUNK - anchor
        near = ((offset > _AROUND[0] - 1) & (offset < _AROUND[1])).nonzero()[:, 0]
        anyone = torch.randint(len(self.go), (rows,), generator=generator)
        if not len(near):
            return anyone
        about = near[torch.randint(len(near), (rows,), generator=generator)]
        return torch.where(torch.rand(rows, generator=generator) < _AGREE, about, anyone)
