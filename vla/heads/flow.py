"""Flow matching (Lipman et al., arXiv 2210.02747) as pi0 uses it (Black et al., arXiv 2410.24164; openpi's source).

Time runs from noise to data: x_t = t eps + (1 - t) a, so that t = 1 is noise and t = 0 the actions; the velocity u = eps - a points away
from the data, and Euler steps of dt = -1/N walk back along it. All of this is published. `reversed_time` gives the other convention.

Letters: b rows, h actions of a chunk, a numbers of an action, w width of an embedding. Times are [b 1], or [b h] where actions of one
chunk stand at different times (training-time real-time chunking).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.stages import Context
from mmsdk.vla.heads.state import padded
from mmsdk.vla.types import ActionChunk, Observation

__all__ = [
    "FlowHead",
    "FlowNetwork",
    "Guide",
    "Velocity",
    "euler",
    "flow_loss",
    "interpolate",
    "noise_of",
    "reversed_time",
    "sample_times",
    "time_embedding",
    "unguided",
]

# (x_t, t) -> dx/dt: [b h a] and [b 1] or [b h] to [b h a].
Velocity = Callable[[Tensor, Tensor], Tensor]
# Changes where the flow goes, for example towards what a robot is already doing.
Guide = Callable[[Velocity], Velocity]

_DRAWN = torch.zeros(0, 0)


@runtime_checkable
class FlowNetwork(Protocol):
    """A network that knows the velocity of noisy actions, given what the decoder knows and the state."""

    @property
    def chunk(self) -> int:
        """h, the actions it predicts at once."""
        ...

    @property
    def action_dim(self) -> int:
        """a, the numbers of an action, padding included."""
        ...

    @property
    def state_dim(self) -> int:
        """p, the numbers of a state, padding included; 0 where the state is part of the prompt."""
        ...

    def velocity(self, context: Context, state: Float[Tensor, "b p"]) -> Velocity:
        """The velocity field of these rows. The context's cache is read through one fork, whatever the number of steps."""
        ...


@dataclass(frozen=True, slots=True)
class FlowHead:
    """An `ActionHead` on a flow network: noise of the observation's seed, `steps` Euler steps, the first `dims` numbers of each action.

    What pads the state to the network's width is zero, and what pads the actions never leaves the head.
    """

    network: FlowNetwork
    dims: int
    steps: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.dims <= self.network.action_dim:
            raise InputError(f"it is {self.dims}, the network predicts {self.network.action_dim}", item="dims")
        if self.steps < 1:
            raise InputError(f"it is {self.steps}, it must be at least 1", item="steps")

    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """One chunk for one row. Raises InputError for a state that is too long or not finite."""
        actions = self.guided(context, observation, unguided)
        return ActionChunk(actions, observation.stamp, producer=type(self.network).__name__.lower())

    @torch.no_grad()
    def guided(
        self, context: Context, observation: Observation, guide: Guide, noise: Float[Tensor, "n w"] = _DRAWN
    ) -> Float[Tensor, "h a"]:
        """The actions, on the state's device, with the flow steered by `guide`, which sees them in the network's width.

        They start from `noise`, h actions in that width; no rows: it is drawn from the observation's seed. Raises InputError for another
        shape.
        """
        network, device = self.network, context.hidden.device
        state = padded(observation.state, network.state_dim).to(device)[None]
        shape = (network.chunk, network.action_dim)
        if noise.shape[0] and tuple(noise.shape) != shape:
            raise InputError(f"it is {tuple(noise.shape)}, the network starts from {shape}", item="noise")
        start = noise.float() if noise.shape[0] else noise_of(observation.stamp.seed, shape)
        actions = euler(guide(network.velocity(context, state)), start[None].to(device), self.steps)
        return actions[0, :, : self.dims].to(observation.state.device, torch.float32)


def unguided(velocity: Velocity) -> Velocity:
    """The flow as it is."""
    return velocity


def noise_of(seed: int, shape: tuple[int, ...]) -> Float[Tensor, "*shape"]:
    """Standard normal noise, the same on every machine: drawn on the CPU by a generator of its own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def time_embedding(t: Float[Tensor, "*b"], width: int, shortest: float = 4e-3, longest: float = 4.0) -> Float[Tensor, "*b w"]:
    """[sin(2 pi t / period), cos(2 pi t / period)], the w/2 periods in geometric progression from shortest to longest.

    Computed in float64 as in openpi's PyTorch port: at a period of 0.004 an angle is 1,500, where float32 knows four decimals.
    """
    wide = torch.float32 if t.device.type == "mps" else torch.float64
    share = torch.linspace(0, 1, width // 2, dtype=wide, device=t.device)
    angle = 2 * math.pi * t.to(wide)[..., None] / (shortest * (longest / shortest) ** share)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def sample_times(rows: int, generator: torch.Generator, alpha: float = 1.5) -> Float[Tensor, "b 1"]:
    """Training times, Beta(alpha, 1) * 0.999 + 0.001: noisy ones more often. Beta(alpha, 1) is U^(1/alpha) for uniform U."""
    uniform = torch.rand(rows, 1, generator=generator, device=generator.device)
    return uniform ** (1 / alpha) * 0.999 + 0.001


def interpolate(actions: Float[Tensor, "b h a"], noise: Float[Tensor, "b h a"], t: Float[Tensor, "b #h"]) -> Float[Tensor, "b h a"]:
    """x_t = t eps + (1 - t) a."""
    share = t[..., None].to(actions.dtype)
    return share * noise + (1 - share) * actions


def flow_loss(
    velocity: Velocity,
    actions: Float[Tensor, "b h a"],
    noise: Float[Tensor, "b h a"],
    t: Float[Tensor, "b #h"],
    valid: Bool[Tensor, "b h"] | None = None,
) -> Float[Tensor, ""]:
    """Mean squared error to u = eps - a over the valid steps (all of them where `valid` is not given), padding dimensions included."""
    error = (velocity(interpolate(actions, noise, t), t).float() - (noise - actions).float()).square().mean(-1)
    return error.mean() if valid is None else (error * valid).sum() / valid.sum().clamp_min(1)


@torch.no_grad()
def euler(velocity: Velocity, noise: Float[Tensor, "b h a"], steps: int = 10) -> Float[Tensor, "b h a"]:
    """Walk from noise (t = 1) to actions (t = 0) in `steps` equal steps: t = 1, 1 - 1/N, ..., 1/N."""
    x = noise
    for step in range(steps):
        t = torch.full((x.shape[0], 1), 1 - step / steps, dtype=torch.float64 if x.device.type != "mps" else torch.float32, device=x.device)
        x = x - velocity(x, t).to(x.dtype) / steps
    return x


def reversed_time(velocity: Velocity) -> Velocity:
    """The same flow where 0 is noise and 1 data, as GR00T, Kinetix and most papers write it: v'(x, tau) = -v(x, 1 - tau)."""

    def backwards(x: Tensor, tau: Tensor) -> Tensor:
        return -velocity(x, 1 - tau)

    return backwards
