"""Diffusion Policy: actions by denoising, in few steps by DDIM (arXiv 2303.04137, 2010.02502; lerobot's source) [published].

The squared-cosine schedule gives abar_t; the network predicts the noise eps. A DDIM step with eta 0 clips what it takes for clean,
x0 = clip((x - sqrt(1 - abar_t) eps) / sqrt(abar_t)), and goes on to x' = sqrt(abar_t') x0 + sqrt(1 - abar_t') eps. Actions and state are
min-max normalised to [-1, 1]. The network sees `n_obs` observations, and the chunk begins with the first of them: what is executed starts
at n_obs - 1, the newest.

Letters: o observations, c numbers that tell one observation (state and what the decoder knows), h actions, a numbers of an action.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmsdk.errors import InputError
from mmsdk.stages import Context
from mmsdk.vla.heads.flow import noise_of
from mmsdk.vla.heads.state import padded
from mmsdk.vla.heads.unet import UNet
from mmsdk.vla.types import ActionChunk, Observation

__all__ = ["DDIM", "DiffusionHead", "diffusion_loss", "window"]

# (x_t, t) -> eps: [b h a] and whole times [b] to [b h a].
Noise = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DDIM:
    """The schedule of training and the walk back. `steps` of the `trained` times are visited, evenly, from the noisiest down to 0."""

    trained: int = 100
    steps: int = 10
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.trained:
            raise InputError(f"it is {self.steps}, there are {self.trained} times to visit", item="steps")

    @property
    def abar(self) -> Float[Tensor, " t"]:
        """abar_t, the share of signal: cos^2((s + .008)/1.008 pi/2) by betas of at most .999."""
        s = torch.linspace(0, 1, self.trained + 1, dtype=torch.float64)
        level = torch.cos((s + 0.008) / 1.008 * torch.pi / 2).square()
        return (1 - (1 - level[1:] / level[:-1]).clamp_max(0.999)).cumprod(0)

    @torch.no_grad()
    def __call__(self, predict: Noise, noise: Float[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
        """Walk from noise to actions; the last step lands on the clean ones."""
        abar, stride, x = [*self.abar.tolist()], self.trained // self.steps, noise
        for t in range((self.steps - 1) * stride, -1, -stride):
            before = abar[t - stride] if t >= stride else 1.0
            eps = predict(x, torch.full((x.shape[0],), t, device=x.device))
            clean = ((x - (1 - abar[t]) ** 0.5 * eps) / abar[t] ** 0.5).clamp(-self.clip, self.clip)
            x = before**0.5 * clean + (1 - before) ** 0.5 * eps
        return x


@dataclass(frozen=True, slots=True)
class DiffusionHead:
    """An `ActionHead` on a U-Net. `condition` of one observation is [state, padded to `state_dim` ; what the decoder knows]."""

    network: UNet
    sampler: DDIM = DDIM()
    horizon: int = 64
    executed: int = 32
    n_obs: int = 2
    state_dim: int = 32
    dims: int = 7

    def __post_init__(self) -> None:
        if self.n_obs < 1 or self.n_obs - 1 + self.executed > self.horizon or self.dims > self.network.config.action_dim:
            raise InputError(
                f"{self.executed} actions after {self.n_obs} observations do not fit a chunk of {self.horizon}", item="executed"
            )

    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """A chunk for one row that is the first of its episode; a policy that remembers earlier ones calls `act`."""
        return self.act([self.condition(context, observation)], observation)

    def condition(self, context: Context, observation: Observation) -> Float[Tensor, " c"]:
        """What is remembered of one observation. Raises InputError for a state that is too long or not finite."""
        state = padded(observation.state, self.state_dim).to(context.hidden.device)
        return torch.cat((state.float(), context.hidden[0].float()))

    def act(self, conditions: Sequence[Float[Tensor, " c"]], observation: Observation) -> ActionChunk:
        """A chunk from the newest observations of the episode, oldest first; where there are fewer than n_obs the first is repeated."""
        seen = window(conditions, self.n_obs).flatten()[None]
        noise = noise_of(observation.stamp.seed, (1, self.horizon, self.network.config.action_dim)).to(seen.device)
        actions = self.sampler(lambda x, t: self.network(x, t, seen), noise)
        executed = actions[0, self.n_obs - 1 : self.n_obs - 1 + self.executed, : self.dims]
        return ActionChunk(executed.to(observation.state.device), observation.stamp, producer="diffusion")


def window(conditions: Sequence[Float[Tensor, " c"]], n_obs: int) -> Float[Tensor, "o c"]:
    """The last n_obs, the first repeated where there are fewer. Raises InputError where there is none."""
    if not conditions:
        raise InputError("there is no observation yet", item="observations")
    last = list(conditions[-n_obs:])
    return torch.stack([last[0]] * (n_obs - len(last)) + last)


def diffusion_loss(
    network: UNet, sampler: DDIM, actions: Float[Tensor, "b h a"], condition: Float[Tensor, "b c"], generator: torch.Generator
) -> Float[Tensor, ""]:
    """Mean squared error of the noise, at a time drawn evenly for each row."""
    t = torch.randint(sampler.trained, (actions.shape[0],), generator=generator, device=generator.device)
    noise = torch.randn(actions.shape, generator=generator, device=generator.device).to(actions.device)
    share = sampler.abar.to(actions.dtype)[t.cpu()].to(actions.device)[:, None, None]
    return F.mse_loss(network(share.sqrt() * actions + (1 - share).sqrt() * noise, t.to(actions.device), condition), noise)
