"""What is learned from: for each look of a demonstration what was seen, where the hand was, what was said, and the actions that followed.

Letters: m looks, h actions of a chunk, n tokens of all cameras, k numbers of a token, g ways to say a task, s words, e numbers of a word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.models.mini.words import BOS
from mmsdk.vla.heads.minisight import Lexicon
from mmsdk.vla.heads.state import pi0_prompt
from mmsdk.vla.normalize import Normalizer
from mmsdk.vla.statistics import Statistics

__all__ = ["MIDST", "SPAN", "Lessons", "Phrases", "normalizers", "statistics_of", "where_of"]

MIDST = torch.tensor([0.0, 0.7, 0.1])
SPAN = 0.1
"""Where things are is told in these many metres: from the midst of the table, and from the hand."""
_HELD_OUT, _SCENE_HELD_OUT = 2, 10


@dataclass(frozen=True, slots=True)
class Phrases:
    """The embeddings of every way to tell every task, and which of them are words."""

    words: Float[Tensor, "j g s e"]
    said: Bool[Tensor, "j g s"]

    @classmethod
    def of(cls, lexicon: Lexicon, tasks: Sequence[Sequence[str]]) -> "Phrases":
        """As `mmsdk.vla.flow_model.FlowModel` puts an instruction into tokens."""
        encode = lexicon.tokenizer.encode
        ids = [[[BOS, *encode(pi0_prompt(phrase)[:-1]), *encode("\n")] for phrase in phrases] for phrases in tasks]
        most = max(len(row) for phrases in ids for row in phrases)
        table = torch.tensor([[row + [BOS] * (most - len(row)) for row in phrases] for phrases in ids])
        said = torch.tensor([[[place < len(row) for place in range(most)] for row in phrases] for phrases in ids])
        return cls(lexicon(table.flatten(0, 1)).unflatten(0, table.shape[:2]), said)


@dataclass(frozen=True, slots=True)
class Lessons:
    """One row a look. `held` marks those that are only measured on: the last demonstrations of each task, each tenth scene."""

    features: Float[Tensor, "m n k"]
    states: Float[Tensor, "m 4"]
    chunks: Float[Tensor, "m h 4"]
    valid: Bool[Tensor, "m h"]
    places: Float[Tensor, "m 6"]
    tasks: Int[Tensor, " m"]
    held: Bool[Tensor, " m"]

    def __len__(self) -> int:
        return len(self.states)

    @classmethod
    def of(cls, features: Sequence[Tensor], shards: Sequence[Path], chunk: int) -> "Lessons":
        """All tasks behind one another. States and actions stay in the contract's units."""
        rows = [_rows(load_file(shard), number, chunk) for number, shard in enumerate(shards)]
        columns = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return cls(torch.cat([each.flatten(1, 2) for each in features]), **columns)


def statistics_of(lessons: Lessons) -> dict[str, Statistics]:
    """Mean and deviation of states and of actions."""
    actions = lessons.chunks[lessons.valid].double()
    return {name: {"mean": rows.mean(0), "std": rows.std(0)} for name, rows in (("state", lessons.states.double()), ("action", actions))}


def normalizers(statistics: Mapping[str, Statistics], eps: float = 1e-6) -> tuple[Normalizer, Normalizer]:
    """Of states and of actions."""
    plain = torch.zeros(4, dtype=torch.bool)
    state, action = (Normalizer.of("mean_std", statistics[name], plain, eps, name) for name in ("state", "action"))
    return state, action


def where_of(places: Float[Tensor, "b 6"], states: Float[Tensor, "b 4"]) -> Float[Tensor, "b 12"]:
    """Where the thing and the goal are: on the table, and from the hand."""
    both = places.unflatten(1, (2, 3))
    return torch.cat((both - MIDST, both - states[:, None, :3]), dim=1).flatten(1) / SPAN


def _rows(made: Mapping[str, Tensor], task: int, chunk: int) -> dict[str, Tensor]:
    """A task's demonstrations, look by look; behind the end of one, its last action is repeated and does not count."""
    steps, looks = made["steps"], made["looks"]
    ends = steps.cumsum(0)
    demonstration = torch.arange(len(steps)).repeat_interleave(looks)
    first = (ends - steps)[demonstration] + made["taken"]
    window = first[:, None] + torch.arange(chunk)
    last = ends[demonstration][:, None] - 1
    number = torch.arange(len(steps))
    acts = number >= len(steps) - min(_HELD_OUT, len(steps) - 1)
    held = torch.where(made["acted"], acts, number % _SCENE_HELD_OUT == _SCENE_HELD_OUT - 1)
    return {
        "states": made["states"][first],
        "chunks": made["actions"][window.minimum(last)],
        "valid": (window <= last) & made["acted"][demonstration][:, None],
        "places": made["places"][first],
        "tasks": torch.full_like(first, task),
        "held": held[demonstration],
    }
