"""Fetch arms in MuJoCo over belts that carry things past them, seen by a camera that is late; n simulations side by side.

Two tasks, drawn as `mmsdk.vla.envs.belt` draws them. "belt": one thing, to be picked. "cue": a red and a blue one on two lanes; a lamp
shows one of the colours when the episode begins and goes out before anything may be picked; that one is wanted. The belt runs left or
right at 0.15 to 0.25 m/s, which no single picture tells; what the camera shows is 0.32 s old, 5 to 8 cm of motion, and open fingers leave
2.5 cm to either side. Until it is released, at a step drawn anew for each episode, the arm is held where it waits.

The belt drags things by friction: it brings what lies on it to its own speed at up to 0.8 g, so that a hand can stop a thing. One that
stands still beside a hand for a third of a second is stalled, and that is a failure, like lifting nothing, or the wrong thing, or too late.

Letters: n episodes, o things, p numbers of the state, a of an action.
"""

from dataclasses import dataclass, replace

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.vla.envs import belt
from mmsdk.vla.envs.belt import LIMIT, RATE, Episodes
from mmsdk.vla.envs.fetch_scene import FINGERS, OPEN, SUBSTEPS, THINGS, TIMESTEP, View, scene, settled
from mmsdk.vla.envs.fetch_sizes import CENTRE, LANE, LATE, ON_BELT, REST

__all__ = ["FetchBelts", "Stage", "draw"]

_LIT = 15
_REACH = 0.38
_LOW, _HIGH = (1.15, CENTRE[1] - _REACH, 0.42), (1.45, CENTRE[1] + _REACH, 0.62)
_SPEED = 0.8
_GRIP = 9.81 * 0.8
_LIFTED = 0.05
_STILL, _BESIDE, _SLOW = 8, 0.09, 0.4
_FAR = 0.5
_WAYS = ("", "picked", "wrong", "stalled", "missed")


@dataclass(frozen=True, slots=True)
class Stage:
    """The compiled scene and the arm at rest in it, shared by all simulations of a process."""

    model: "mujoco.MjModel"
    rest: "mujoco.MjData"

    @staticmethod
    def made() -> "Stage":
        """Raises InputError where gymnasium-robotics is not installed."""
        model = scene()
        return Stage(model, settled(model))


def draw(tasks: Bool[Tensor, " n"], generator: torch.Generator) -> Episodes:
    """Episodes of "cue" where `tasks` is True, of "belt" elsewhere; things are near the middle when the arm is released."""
    drawn = belt.draw(tasks, generator)
    return replace(drawn, place=drawn.place * 0.7, lane=drawn.lane.sign() * LANE)


class FetchBelts:
    """One arm to each episode. `outcome` tells how it ended: "" while it goes on, "picked", "wrong", "stalled" or "missed"."""

    def __init__(self, stage: Stage, episodes: Episodes) -> None:
        n, model = len(episodes), stage.model
        self.episodes, self.step = episodes, 0
        self._model, self._there = model, episodes.there.numpy()
        self._place, self._speed = episodes.place.double().numpy(), episodes.speed.double().numpy()
        self._lane, self._go = CENTRE[0] + episodes.lane.double().numpy(), episodes.go.numpy()
        self._datas = [mujoco.MjData(model) for _ in range(n)]
        self._joints = [model.joint(f"{name}:joint") for name in THINGS]
        self._fingers = [int(model.joint(name).qposadr[0]) for name in FINGERS]
        self._tip = model.site("robot0:grip").id
        self._hang = stage.rest.mocap_pos[0] - stage.rest.site_xpos[self._tip]
        self._ended, self._closing = np.zeros(n, np.int64), np.zeros(n, np.int64)
        for data in self._datas:
            data.qpos[:], data.qvel[:], data.ctrl[:] = stage.rest.qpos, 0.0, OPEN
            data.mocap_pos[:], data.mocap_quat[:] = stage.rest.mocap_pos, stage.rest.mocap_quat
        for row in range(n):
            self._carry(row)
        self._poses = [self._pose()]
        self._were = [self._things()]

    def __len__(self) -> int:
        return len(self._datas)

    @property
    def running(self) -> Bool[Tensor, " n"]:
        """Which episodes go on."""
        return torch.from_numpy(self._ended == 0)

    @property
    def outcome(self) -> list[str]:
        """How each episode ended so far."""
        return [_WAYS[code] for code in self._ended.tolist()]

    @property
    def closing(self) -> Bool[Tensor, " n"]:
        """Which hands are told to close."""
        return torch.from_numpy(self._closing > 0)

    @property
    def holding(self) -> Bool[Tensor, " n"]:
        """Which hands were told so for four steps running: time enough to hold what is between the fingers."""
        return torch.from_numpy(self._closing >= 4)

    @property
    def hands(self) -> Float[Tensor, "n 3"]:
        """Where the fingertips are, in metres of the world."""
        return torch.from_numpy(np.stack([data.site_xpos[self._tip] for data in self._datas])).float()

    @property
    def things(self) -> Float[Tensor, "n o 3"]:
        """Where the things really are; no policy is told."""
        return torch.from_numpy(self._things()).float()

    @property
    def shown(self) -> Float[Tensor, "n o 3"]:
        """Where the things were when the camera took what it shows now."""
        return torch.from_numpy(self._were[self._then]).float()

    @property
    def lamps(self) -> Int[Tensor, " n"]:
        """The thing whose colour the lamp has in what the camera shows now; -1 where it is out."""
        return torch.where(self.episodes.cued & (self._then < _LIT), self.episodes.wanted, -1)

    @property
    def _then(self) -> int:
        return max(0, self.step - LATE)

    def state(self) -> Float[Tensor, "n p"]:
        """What the arm feels now, not late: its hand's x, y and z in metres from where it waits, the fingers' opening (1: open), and
        whether it is released."""
        opening = np.stack([data.qpos[self._fingers].mean() / OPEN for data in self._datas])
        released = torch.from_numpy(self.step >= self._go).float()
        home = torch.tensor([*CENTRE, REST])
        return torch.cat((self.hands - home, torch.from_numpy(opening).float()[:, None], released[:, None]), dim=1)

    def pictures(self, view: View) -> Float[Tensor, "n 3 h w"]:
        """What the camera shows now, in [-1, 1]: everything as it was 0.32 s ago (at the start: as it began)."""
        poses, lamps = self._poses[self._then], self.lamps.tolist()
        seen = np.stack([view.picture(pose, lamp) for pose, lamp in zip(poses, lamps, strict=True)])
        return torch.from_numpy(seen).permute(0, 3, 1, 2).float() / 127.5 - 1

    def apply(self, action: Float[Tensor, "n a"]) -> None:
        """One step: go towards x, y and z, in metres from where the hand waits, at most at 0.8 m/s along each axis and never out of the
        workspace; close where the fourth number is above 0. What is not finite leads home. An arm that is not released yet does nothing."""
        home = np.array([*CENTRE, REST])
        wish = action[:, :3].double().numpy() + home
        target = np.clip(np.where(np.isfinite(wish), wish, home), _LOW, _HIGH)
        shut = action[:, 3].numpy() > 0
        self.step += 1
        for row in map(int, np.flatnonzero(self._ended == 0)):
            if self.step <= self._go[row]:
                self._carry(row)
                continue
            self._closing[row] = self._closing[row] + 1 if shut[row] else 0
            self._simulate(row, target[row], bool(shut[row]))
        self._poses.append(self._pose())
        self._were.append(self._things())
        self._ended = np.where(self._ended == 0, self._judged(), self._ended)

    def _carry(self, row: int) -> None:
        """While the arm is held nothing touches the things: they are where the belt has brought them."""
        data = self._datas[row]
        along = CENTRE[1] + self._place[row] + (self.step - self._go[row]) / RATE * self._speed[row]
        for thing in np.flatnonzero(self._there[row]):
            at, moves = self._joints[thing].qposadr[0], self._joints[thing].dofadr[0]
            data.qpos[at : at + 7] = (self._lane[row, thing], along[thing], ON_BELT, 1.0, 0.0, 0.0, 0.0)
            data.qvel[moves : moves + 6] = (0.0, self._speed[row], 0.0, 0.0, 0.0, 0.0)
        mujoco.mj_kinematics(self._model, data)

    def _simulate(self, row: int, target: Float[np.ndarray, "3"], shut: bool) -> None:
        data, speed = self._datas[row], self._speed[row]
        way = np.clip(target + self._hang - data.mocap_pos[0], -_SPEED / RATE, _SPEED / RATE) / SUBSTEPS
        data.ctrl[:] = 0.0 if shut else OPEN
        on_belt = [
            (int(joint.qposadr[0]), int(joint.dofadr[0])) for joint, there in zip(self._joints, self._there[row], strict=True) if there
        ]
        most = _GRIP * TIMESTEP
        for _ in range(SUBSTEPS):
            data.mocap_pos[0] += way
            for at, moves in on_belt:
                if data.qpos[at + 2] < ON_BELT + 0.004:
                    slip = np.array((-data.qvel[moves], speed - data.qvel[moves + 1]))
                    data.qvel[moves : moves + 2] += slip * min(1.0, most / max(float(np.hypot(*slip)), 1e-9))
            mujoco.mj_step(self._model, data)
        mujoco.mj_kinematics(self._model, data)

    def _judged(self) -> Int[np.ndarray, " n"]:
        """What has become of each episode."""
        now, rows = self._were[-1], np.arange(len(self))
        lifted = self._there & (now[..., 2] > ON_BELT + _LIFTED)
        wanted = self.episodes.wanted.numpy()
        ended = np.zeros(len(self), np.int64)
        ended[self._stopped(now).any(1)] = 3
        ended[lifted.any(1)] = 2
        ended[lifted[rows, wanted]] = 1
        gone = (now[rows, wanted, 1] - CENTRE[1]) * np.sign(self._speed) > _FAR
        ended[(ended == 0) & (gone | (self.step >= LIMIT))] = 4
        return ended

    def _stopped(self, now: Float[np.ndarray, "n o 3"]) -> Bool[np.ndarray, "n o"]:
        """Which things stand beside a hand although the belt runs."""
        if self.step < _STILL:
            return np.zeros_like(self._there)
        hands = self.hands.double().numpy()
        moved = (now[..., 1] - self._were[-1 - _STILL][..., 1]) / (self._speed[:, None] * _STILL / RATE)
        beside = np.linalg.norm(now[..., :2] - hands[:, None, :2], axis=-1) < _BESIDE
        down = now[..., 2] < ON_BELT + 0.01
        stalled: np.ndarray = self._there & down & beside & (moved < _SLOW) & (self.step >= self._go + _STILL)[:, None]
        return stalled

    def _things(self) -> Float[np.ndarray, "n o 3"]:
        places = [[data.qpos[joint.qposadr[0] : joint.qposadr[0] + 3] for joint in self._joints] for data in self._datas]
        return np.array(places)

    def _pose(self) -> list[Float[np.ndarray, " q"]]:
        return [data.qpos.copy() for data in self._datas]
