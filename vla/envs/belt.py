"""A belt that carries things past a hand, seen by a camera that is late: simple kinematics, a batch of episodes at a time.

Two tasks. "belt": one thing, to be picked. "cue": a red and a blue one on two lanes; a lamp shows one of the colours when the episode
begins and goes out long before anything may be picked; that one is wanted. The belt runs left or right at 0.15 to 0.25 m/s, which no single
picture tells. What the camera shows is 0.32 s old, 6 cm or more of motion, and the hand has 2 cm to either side. When it may pick ("go",
a flag in the state) is drawn anew for each episode.

The hand follows commanded positions at 0.8 m/s and closes once. What stands in its way when it closes, but not between its fingers, is
stalled, and that is a failure, like closing on nothing, on the wrong thing, or never.

Letters: n episodes, o things (two; the second is not there in "belt"). Lengths in metres, x along the belt, y across.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["ACTION", "CHUNK", "HEIGHT", "LIMIT", "PERIOD", "RATE", "STATE", "WIDTH", "Episodes", "Hands", "draw", "expert", "picture"]

RATE = 25
"""Control steps a second."""
CHUNK = 10
"""Steps from one decision to the next; nothing is allowed to begin in between."""
PERIOD = 30
"""Steps from one VLM update to the next."""
LIMIT = 120
"""Steps of an episode."""
HEIGHT, WIDTH = 12, 64
STATE, ACTION = 4, 3

_LATE = 8
_LIT = 15
_VIEW, _REACH, _LANE = 0.5, 0.4, 0.05
_SPEED, _CLOSING = 0.8, 2
_ALONG, _ACROSS, _FOOT = 0.02, 0.025, 0.06
_SHARP = 0.02
_ALIGNED = 0.006


@dataclass(frozen=True, slots=True)
class Episodes:
    """What is drawn for each episode: where the things are at "go", on which lane, how fast the belt runs (negative: to the left).

    The first thing is red and the second blue. `wanted` is the one to pick, `cued` whether a lamp tells so, `go` the step of "go".
    """

    place: Float[Tensor, "n o"]
    lane: Float[Tensor, "n o"]
    there: Bool[Tensor, "n o"]
    speed: Float[Tensor, " n"]
    wanted: Int[Tensor, " n"]
    cued: Bool[Tensor, " n"]
    go: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.go)

    def at(self, step: Int[Tensor, " n"]) -> Float[Tensor, "n o"]:
        """Where the things are along the belt at a step of each episode."""
        return self.place + ((step - self.go) / RATE * self.speed)[:, None]


def draw(tasks: Bool[Tensor, " n"], generator: torch.Generator, go: Int[Tensor, " n"] | None = None) -> Episodes:
    """Episodes of "cue" where `tasks` is True, of "belt" elsewhere. `go` is drawn too unless it is given (a multiple of CHUNK)."""
    n = len(tasks)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def coin() -> Tensor:
        return torch.rand(n, generator=generator) < 0.5

    drawn = CHUNK * torch.randint(PERIOD // CHUNK, 3 * PERIOD // CHUNK, (n,), generator=generator)
    first, apart = uniform(-0.2, 0.2, n), uniform(-0.06, 0.06, n)
    side, wanted = torch.where(coin(), _LANE, -_LANE), coin()
    speed = uniform(0.15, 0.25, n) * torch.where(coin(), 1, -1)
    there = torch.stack((~wanted | tasks, wanted | tasks), dim=1)
    return Episodes(
        place=torch.stack((first, first + apart), dim=1),
        lane=torch.stack((side, -side), dim=1),
        there=there,
        speed=speed,
        wanted=wanted.long(),
        cued=tasks,
        go=drawn if go is None else go,
    )


def picture(episodes: Episodes, step: int) -> Float[Tensor, "n 3 h w"]:
    """What the camera shows at a step, in [-1, 1]: the belt as it was 0.32 s ago (at the start: as it began), below it the lamp."""
    seen = torch.full_like(episodes.go, max(0, step - _LATE))
    columns = torch.linspace(-_VIEW, _VIEW, WIDTH)
    rows = torch.linspace(-2 * _LANE, 2 * _LANE, HEIGHT - 4)
    along = torch.exp(-(((columns - episodes.at(seen)[..., None]) / _SHARP) ** 2))
    across = torch.exp(-(((rows - episodes.lane[..., None]) / _LANE) ** 2) * 2)
    blobs = across[..., :, None] * along[..., None, :] * episodes.there[..., None, None]
    canvas = torch.zeros(len(episodes), 3, HEIGHT, WIDTH)
    canvas[:, 0, : HEIGHT - 4], canvas[:, 2, : HEIGHT - 4] = blobs[:, 0], blobs[:, 1]
    lit = episodes.cued & (seen < _LIT)
    canvas[:, 0, HEIGHT - 4 :, :8] = (lit & (episodes.wanted == 0)).float()[:, None, None]
    canvas[:, 2, HEIGHT - 4 :, :8] = (lit & (episodes.wanted == 1)).float()[:, None, None]
    return 2 * canvas - 1


class Hands:
    """One hand to each episode. `outcome` tells how it ended: "" while it goes on, "picked", "wrong", "stalled" or "missed"."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes
        n = len(episodes)
        self.place = torch.zeros(n, 2)
        self.step = 0
        self._closing = torch.zeros(n, dtype=torch.long)
        self._ended = torch.zeros(n, dtype=torch.long)

    @property
    def running(self) -> Bool[Tensor, " n"]:
        """Which hands have not closed yet."""
        return self._ended == 0

    @property
    def closing(self) -> Bool[Tensor, " n"]:
        """Which hands have begun to close."""
        return self._closing > 0

    @property
    def outcome(self) -> list[str]:
        """How each episode ended so far."""
        return [("", "picked", "wrong", "stalled", "missed")[code] for code in self._ended.tolist()]

    def state(self) -> Float[Tensor, "n p"]:
        """What is felt now, not late: the hand's x and y (1 at the ends of its reach), how far it has closed, and "go"."""
        x, y = self.place[:, 0] / _REACH, self.place[:, 1] / _LANE
        return torch.stack((x, y, self._closing / _CLOSING, (self.step >= self.episodes.go).float()), dim=1)

    def apply(self, action: Float[Tensor, "n a"]) -> None:
        """One step: go towards x and y (1 at the ends of the reach), close where the third number is above 0. Closing is not undone."""
        wish = action[:, :2].clamp(-1, 1) * torch.tensor([_REACH, _LANE])
        way = wish - self.place
        length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
        moved = self.place + way * (_SPEED / RATE / length.clamp_min(1e-9)).clamp_max(1)
        self.place = torch.where(self.running[:, None], moved, self.place)
        self.step += 1
        self._closing += self.running & (self.closing | (action[:, 2] > 0))
        self._ended = torch.where(self.running & (self._closing >= _CLOSING), self._judged(), self._ended)

    def _judged(self) -> Int[Tensor, " n"]:
        """What becomes of a hand that closes now."""
        along = (self.episodes.at(torch.full_like(self._ended, self.step)) - self.place[:, :1]).abs()
        across = (self.episodes.lane - self.place[:, 1:]).abs()
        near = self.episodes.there & (across < _ACROSS)
        held, touched = near & (along < _ALONG), near & (along < _FOOT)
        right = held.gather(1, self.episodes.wanted[:, None])[:, 0]
        ended = torch.full_like(self._ended, 4)
        ended = torch.where((touched & ~held).any(1), 3, ended)
        ended = torch.where(held.any(1), 2, ended)
        return torch.where(right, 1, ended)


def expert(hands: Hands) -> Float[Tensor, "n a"]:
    """Knows everything: waits at home until "go", then follows the wanted thing and closes on it."""
    episodes = hands.episodes
    going = hands.step >= episodes.go
    now, chosen = torch.full_like(episodes.go, hands.step + 1), episodes.wanted[:, None]
    x, y = episodes.at(now).gather(1, chosen)[:, 0], episodes.lane.gather(1, chosen)[:, 0]
    target = torch.stack((x / _REACH, y / _LANE), dim=1).clamp(-1, 1)
    before = episodes.at(now - 1).gather(1, chosen)[:, 0]
    near = ((before - hands.place[:, 0]).abs() < _ALIGNED) & ((y - hands.place[:, 1]).abs() < _ALIGNED)
    close = torch.where(going & (near | hands.closing), 1.0, -1.0)
    return torch.cat((target * going[:, None], close[:, None]), dim=1)
