"""A script that picks what a belt brings, told where everything is: it follows, sinks as it comes to stand above, closes and lifts.

What it would do is told for held arms, too: they follow the wanted thing from where they wait.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.vla.envs.belt import RATE
from mmsdk.vla.envs.fetch_belt import FetchBelts
from mmsdk.vla.envs.fetch_sizes import CENTRE, ON_BELT, REST

__all__ = ["expert"]

_AHEAD = 1.5
"""Steps by which the hand trails behind what it is told."""
_REACH = 0.36
_GRASP = ON_BELT - 0.002
_NEAR, _SLOPE = 0.012, 6.0


def expert(belts: FetchBelts) -> Float[Tensor, "n a"]:
    """The commands of this step: x, y and z from where the hand waits, and 1 to close or -1 to open."""
    episodes, hands = belts.episodes, belts.hands
    chosen = episodes.wanted[:, None, None].expand(-1, 1, 3)
    thing, home = belts.things.gather(1, chosen)[:, 0], torch.tensor([*CENTRE, REST])
    away = torch.linalg.vector_norm(hands[:, :2] - thing[:, :2], dim=1)
    follow = thing[:, 1] + episodes.speed * _AHEAD / RATE
    height = (_GRASP + _SLOPE * (away - _NEAR).clamp_min(0)).clamp_max(REST)
    over = (away < _NEAR) & (hands[:, 2] < _GRASP + 0.012)
    shut = over | belts.closing
    released = belts.step >= episodes.go
    height = torch.where(belts.holding, REST, torch.where(released, height, REST))
    along = (follow - home[1]).clamp(-_REACH, _REACH)
    return torch.stack((thing[:, 0] - home[0], along, height - home[2], torch.where(shut & released, 1.0, -1.0)), dim=1)
