"""Real-time chunking: the next chunk is made to go on from the one that is being executed (Black et al., arXiv 2506.07339).

While a policy thinks, the robot executes d more actions of the old chunk: those are certain, and what follows should not jump. The flow is
guided as in inpainting [published]: from where it is heading, xhat = x + (1 - tau) v, to where it should, Y (the old chunk from now on),
v' = v + g J^T W (Y - xhat), with J = d xhat / d x, soft weights W, and g = min((1 - tau)/tau r^-2, beta) where
r^-2 = ((1 - tau)^2 + tau^2)/(1 - tau)^2. Here tau = 1 - t: 0 is noise.

Three modes, named for what they compute:
- "vjp": the formula as it stands, one backward pass a step (Kinetix: beta 5, exponential weights, 5 steps).
- "identity": J = I, so that no gradient is needed. This is what lerobot's main branch computes, whose denoiser runs before its input
  requires a gradient; others report that it works as well or better.
- "hard-prefix": no guidance. The first d tokens are the old actions at clean time in every step (arXiv 2512.05964); only a network
  trained with a time for each token knows what that means.

Y has weight 0 wherever the old chunk says nothing, so that no padding pulls the motion anywhere.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.heads.flow import Guide, Velocity, unguided

__all__ = ["Anew", "Chunking", "RealTimeChunking", "guidance", "prefix_weights"]

Mode = Literal["vjp", "identity", "hard-prefix"]
Schedule = Literal["exp", "linear", "ones", "zeros"]


@runtime_checkable
class Chunking(Protocol):
    """How a chunk takes up what is committed: the guide for the first k actions still to come, in the network's units.

    Of them `delay` will be executed meanwhile; `shape` is the network's (chunk, action_dim).
    """

    def guide(self, pending: Float[Tensor, "k a"], delay: int, shape: tuple[int, int]) -> Guide: ...


@dataclass(frozen=True, slots=True)
class Anew:
    """A `Chunking` in which every chunk is made anew: what is committed is not looked at."""

    def guide(self, pending: Float[Tensor, "k a"], delay: int, shape: tuple[int, int]) -> Guide:
        """No guidance."""
        return unguided


@dataclass(frozen=True, slots=True)
class RealTimeChunking:
    """Makes a `Guide` of what is committed.

    `overlap` caps how many old actions are looked at (lerobot's `execution_horizon`, 10; 0: all of them, as in Kinetix).
    """

    mode: Mode = "vjp"
    beta: float = 5.0
    schedule: Schedule = "exp"
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InputError(f"mode {self.mode!r} is not known; there is {', '.join(get_args(Mode))}", item="rtc")
        _check_schedule(self.schedule)
        if not 0 < self.beta < math.inf or self.overlap < 0:
            raise InputError(f"beta {self.beta} is above 0, overlap {self.overlap} is 0 (all) or a number of actions", item="rtc")

    def guide(self, pending: Float[Tensor, "k a"], delay: int, shape: tuple[int, int]) -> Guide:
        """The guide for the first k actions still to come, in the network's units, of which `delay` will be executed meanwhile.

        `shape` is the network's (chunk, action_dim). Numbers beyond the a given ones are not guided; a hard prefix holds them at 0, as
        training pads them. Raises InputError for a negative delay and for more numbers than the network has.
        """
        (k, a), (chunk, width) = pending.shape, shape
        if delay < 0 or a > width or not bool(pending.isfinite().all()):
            raise InputError(f"{a} finite numbers, at most {width}, and a delay from 0, not {delay}, are needed", item="pending")
        end = min(k, chunk, self.overlap or chunk)
        if not end:
            return unguided
        target = pending.new_zeros(chunk, width, dtype=torch.float32)
        target[:end, :a] = pending[:end].float()
        if self.mode == "hard-prefix":
            return _HardPrefix(target, min(delay, end))
        weights = torch.zeros(chunk, width, device=pending.device)
        weights[:, :a] = prefix_weights(delay, end, chunk, self.schedule).to(pending.device)[:, None]
        return _Soft(target, weights, self.beta, self.mode == "vjp")


def prefix_weights(start: int, end: int, total: int, schedule: Schedule) -> Float[Tensor, " h"]:
    """1 for the first `start` actions, falling towards `end`, 0 from there on ("ones": 1 up to the end, "zeros": 0 after the start)."""
    _check_schedule(schedule)
    start, i = min(start, end), torch.arange(total, dtype=torch.float64)
    if schedule == "ones":
        weights = torch.ones(total, dtype=torch.float64)
    elif schedule == "zeros":
        weights = (i < start).double()
    else:
        weights = ((start - 1 - i) / (end - start + 1) + 1).clamp(0, 1)
    if schedule == "exp":
        weights = weights * torch.expm1(weights) / (math.e - 1)
    return torch.where(i < end, weights, 0).float()


def _check_schedule(schedule: str) -> None:
    if schedule not in get_args(Schedule):
        raise InputError(f"schedule {schedule!r} is not known; there is {', '.join(get_args(Schedule))}", item="rtc")


def guidance(tau: Float[Tensor, "*b"], beta: float) -> Float[Tensor, "*b"]:
    """g, how strongly the flow is guided: at most beta, which it is at both ends."""
    exact = ((1 - tau).square() + tau.square()) / (tau * (1 - tau))
    return exact.nan_to_num(beta, beta, beta).clamp_max(beta)


@dataclass(frozen=True, slots=True)
class _Soft:
    """Guidance towards the target where it has weight."""

    target: Float[Tensor, "h a"]
    weights: Float[Tensor, "h a"]
    beta: float
    backward: bool

    def __call__(self, velocity: Velocity) -> Velocity:
        return _Guided(velocity, self)

    def error(self, x: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Where the flow is heading, and by how much that misses the target."""
        heading = x - t[..., None].to(x.dtype) * v
        return heading, ((self.target.to(x.device) - heading) * self.weights.to(x.device)).detach()


@dataclass(frozen=True, slots=True)
class _Guided:
    velocity: Velocity
    guide: _Soft

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        if self.guide.backward:
            v, correction = self._by_gradient(x, t)
        else:
            v = self.velocity(x, t)
            correction = self.guide.error(x, t, v)[1]
        # against the correction, for in this convention of time velocities point away from the data
        return v - guidance(1 - t, self.guide.beta)[..., None].to(v.dtype) * correction

    def _by_gradient(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_inference_mode_enabled():
            raise InputError("it needs gradients, which inference mode rules out; use torch.no_grad", item="vjp")
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = self.velocity(x, t)
            heading, error = self.guide.error(x, t, v)
            (correction,) = torch.autograd.grad(heading, x, error)
        return v.detach(), correction


@dataclass(frozen=True, slots=True)
class _HardPrefix:
    """The first `count` actions are the target at clean time; the flow takes them there on a straight line."""

    target: Float[Tensor, "h a"]
    count: int

    def __call__(self, velocity: Velocity) -> Velocity:
        target = self.target

        def held(x: Tensor, t: Tensor) -> Tensor:
            certain = torch.arange(target.shape[0], device=x.device) < self.count
            clean = target.to(x.device, x.dtype)
            v = velocity(torch.where(certain[:, None], clean, x), torch.where(certain, torch.zeros_like(t), t))
            return torch.where(certain[:, None], (x - clean) / t[..., None].to(x.dtype), v.to(x.dtype))

        return held
