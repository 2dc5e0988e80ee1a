"""The actor of DORA: from what a block of a vision transformer shows to whether to prune, how many tokens, and which.

It is small beside the transformer (below one in a hundred of its operations), and the which is asked only of rows that prune. All of its
shape is our reconstruction; see `mmsdk.tokencomp.methods.dora`.

Letters: b rows, s tokens of all rows together, d width of the transformer, k inner width, f fractions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mmsdk.errors import ModelError
from mmsdk.tokencomp.ranking import top_within
from mmsdk.vision.packed import Rows
from mmsdk.vision.prune import View

__all__ = ["FRACTIONS", "Actor", "ActorConfig", "Brief", "removals", "staying"]

FRACTIONS = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
"""What part of a row's patch tokens can go at one block."""


@dataclass(frozen=True, slots=True)
class ActorConfig:
    """The transformer it belongs to (class tokens are one), and its own width; `drop` is the accuracy in percentage points that its
    training was steered to give away.

    `eligible` are the blocks before which it looks, all but the first two and the last where there are none.
    """

    width: int = 384
    depth: int = 12
    hidden: int = 64
    drop: float = 1.0
    eligible: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if list(self.eligible) != sorted({i for i in self.eligible if 0 < i < self.depth}):
            raise ModelError(f"an actor looks before blocks of 1 to {self.depth - 1}, in ascending order, not {self.eligible}")

    @property
    def blocks(self) -> tuple[int, ...]:
        """The eligible blocks, ascending."""
        return self.eligible or tuple(range(2, self.depth - 1))


@dataclass(frozen=True, slots=True)
class Brief:
    """What the actor looks at: of each token the normalised state, and the logarithms of its norm and of the attention that it received.

    `where` is of each row the logarithm of the share of its patch tokens that are left, and the block's place in the depth.
    """

    states: Float[Tensor, "s d"]
    norm: Float[Tensor, " s"]
    received: Float[Tensor, " s"]
    where: Float[Tensor, "b 2"]
    rows: Rows

    @staticmethod
    def of(view: View) -> "Brief":
        """States as wide as the transformer runs in, all else in float32."""
        rows, stream = view.rows, view.stream
        width = stream.shape[1]
        states, mean, inverse = torch.native_layer_norm(stream, [width], None, None, 1e-5)
        # the norm by the moments that normalising has found
        norm = (width * (inverse.float().pow(-2) + mean.float().square()))[:, 0].clamp_min(1e-12).log() / 2
        share = (_patches(rows) / (rows.full - rows.first)).clamp_min(1e-6).log()
        where = torch.stack((share, torch.full_like(share, view.block / view.depth)), dim=1)
        return Brief(states, norm, view.received.clamp_min(1e-9).log(), where, rows)

    def only(self, chosen: Bool[Tensor, " b"]) -> "Brief":
        """The rows that are chosen, numbered anew."""
        if bool(chosen.all()):
            return self
        token, rows = self.rows.chosen(chosen)
        return Brief(self.states[token], self.norm[token], self.received[token], self.where[chosen], rows)

    @property
    def marks(self) -> Float[Tensor, "s 3"]:
        """Of each token its cosine to the class token, and norm and attention against the mean of its row."""
        # normalised states have the norm sqrt(d)
        cosines = (self.states @ self.states[self.rows.starts].T).float() / self.states.shape[1]
        cosine = cosines.gather(1, self.rows.row[:, None])[:, 0]
        return torch.stack((cosine, _centred(self.norm, self.rows), _centred(self.received, self.rows)), dim=1)


class Actor(nn.Module):
    """Two heads over a row's summary, and one that ranks its tokens."""

    def __init__(self, config: ActorConfig = ActorConfig()) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.summary = nn.Linear(3 * config.width, hidden)
        self.trunk = nn.Linear(hidden + 3, hidden)
        self.gate = nn.Linear(hidden, 1)
        self.count = nn.Linear(hidden, len(FRACTIONS))
        self.token = nn.Linear(config.width, hidden, bias=False)
        self.context = nn.Linear(hidden, hidden)
        self.marks = nn.Linear(3, hidden, bias=False)
        self.rank = nn.Linear(hidden, 1, bias=False)
        # untrained, it prunes something at most blocks, and keeps what the class token looks at
        self.attention = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for head in (self.gate, self.count, self.rank):
                head.weight.zero_()
            self.gate.bias.fill_(1.0)
            self.count.bias.zero_()

    def forward(self, brief: Brief) -> tuple[Float[Tensor, " b"], Float[Tensor, "b f"], Float[Tensor, "b k"]]:
        """Whether and how many, as logits, and the context in which `which` ranks."""
        rows = brief.rows
        mean, deviation = _moments(brief.states, rows)
        looks = torch.cat((brief.states[rows.starts].float(), mean, deviation), dim=1)
        drop = torch.full_like(brief.where[:, :1], self.config.drop)
        context = F.gelu(self.trunk(torch.cat((F.gelu(self.summary(looks)), brief.where, drop), dim=1)))
        return self.gate(context)[:, 0], self.count(context), context

    def which(self, brief: Brief, context: Float[Tensor, "b k"]) -> Float[Tensor, " s"]:
        """A logit of each token, the higher the rather it stays; class tokens have one, too, which nobody reads."""
        marks = brief.marks
        own = F.linear(brief.states, self.token.weight.to(brief.states.dtype)).float()
        inner = own + self.marks(marks) + self.context(context)[brief.rows.row]
        learned: Tensor = self.rank(F.gelu(inner))[:, 0]
        return learned + self.attention * marks[:, 2]

    def ranking(self) -> list[nn.Parameter]:
        """The parameters that say which."""
        parts = (self.token, self.context, self.marks, self.rank)
        return [*(parameter for part in parts for parameter in part.parameters()), self.attention]

    def flops(self, tokens: int) -> int:
        """Operations of one look at a row of so many tokens that prunes, a multiplication and an addition being two."""
        width, hidden = self.config.width, self.config.hidden
        per_row = 3 * width * hidden + (hidden + 3) * hidden + hidden * (1 + len(FRACTIONS)) + hidden * hidden
        # normalisation, moments and cosine read each state a few times
        return 2 * per_row + 2 * tokens * (width * hidden + 3 * hidden + hidden + 6 * width)

    @staticmethod
    def read(config: ActorConfig, tensors: Mapping[str, Tensor]) -> "Actor":
        """An actor of these tensors, float32. Raises RuntimeError where a name or shape does not fit."""
        with torch.device("meta"):
            actor = Actor(config)
        actor.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return actor.eval().requires_grad_(False)


def removals(choice: Int[Tensor, " b"], patches: Int[Tensor, " b"], least: int) -> Int[Tensor, " b"]:
    """How many tokens go by the fraction chosen: its floor, and never so many that fewer than `least` are left."""
    fraction = torch.tensor(FRACTIONS, device=choice.device)[choice]
    return torch.minimum((fraction * patches).floor().long(), patches - least).clamp_min(0)


def staying(keep: Float[Tensor, " s"], remove: Int[Tensor, " b"], rows: Rows) -> Bool[Tensor, " s"]:
    """All but the `remove` patch tokens of each row with the lowest logits; of those equal to the last that stays, the earlier stay."""
    logits = keep.masked_fill(~rows.patch, math.inf)
    quota = torch.tensor(rows.lengths, device=keep.device) - remove
    return top_within(logits[None], rows.row[None], quota[None])[0]


def _patches(rows: Rows) -> Int[Tensor, " b"]:
    return torch.tensor(rows.lengths, device=rows.token.device) - rows.first


def _moments(states: Float[Tensor, "s d"], rows: Rows) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
    """Mean and standard deviation of each row's patch states, which are of the order of 1."""
    count = _patches(rows)[:, None]
    member = (F.one_hot(rows.row, len(rows.lengths)) * rows.patch[:, None]).T.to(states.dtype)
    mean, square = (member @ states).float() / count, (member @ states.square()).float() / count
    return mean, (square - mean.square()).clamp_min(0).sqrt()


def _centred(values: Float[Tensor, " s"], rows: Rows) -> Float[Tensor, " s"]:
    """Values of patch tokens less their row's mean; those of class tokens are 0."""
    patch, row = rows.patch, rows.row
    mean = values.new_zeros(len(rows.lengths)).index_add(0, row, values.masked_fill(~patch, 0.0)) / _patches(rows)
    return (values - mean[row]).masked_fill(~patch, 0.0)
