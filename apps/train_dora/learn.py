"""How the actor learns from episodes: rewards, a privileged critic, advantages, clipped updates, and the price of a loss of fidelity.

Reward of a step: operations it saves as a share of the dense transformer's, plus lambda times its credit; nothing is discounted. Lambda is
one number for all pictures, and moves until the accuracy that is given away is what was aimed at (closed loop). The critic sees what no
deployed actor could: the labels, the dense transformer's features, and the shadow's prediction. PPO is arXiv 1707.06347, the advantage
estimate arXiv 1506.02438.

Letters: b pictures, j steps, i inputs of the critic, d width, c names.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.apps.train_dora.episodes import Episodes
from mmsdk.apps.train_dora.policy import odds
from mmsdk.tokencomp.actor import Actor

__all__ = ["Critic", "Loop", "Recipe", "advantages", "improve", "privileged", "rewards"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The constants of training; the clip, the trace, the entropy bonus and the loop's are the specification's, the others ours."""

    updates: int = 300
    rows: int = 32
    epochs: int = 2
    clip: float = 0.2
    trace: float = 0.95
    entropy: float = 0.01
    lr: float = 1e-3
    rank_lr: float = 1e-4
    critic_lr: float = 1e-3
    least: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Loop:
    """Steers lambda by the loss of accuracy, in percentage points and smoothed, towards the target.

    It begins low: what begins dear closes every gate before the loop can make it cheaper, as a loss of fidelity counts in whole nats and
    what is saved in tenths.
    """

    target: float = 1.0
    price: float = 0.2
    drop: float = 0.0
    speed: float = 0.1
    memory: float = 0.9
    bounds: tuple[float, float] = (0.1, 1e3)

    def after(self, drop: float) -> "Loop":
        """With one more batch's loss seen: what is lost beyond the target makes fidelity dearer."""
        smooth = self.memory * self.drop + (1 - self.memory) * drop
        least, most = self.bounds
        price = min(most, max(least, self.price * math.exp(self.speed * (smooth - self.target))))
        return replace(self, price=price, drop=smooth)


class Critic(nn.Module):
    """What is still to be had from a state, by all that is known in training."""

    def __init__(self, inputs: int, hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b"]:
        """One value a state."""
        value: Tensor = self.layers(x)
        return value[..., 0]


def privileged(episodes: Episodes, features: Float[Tensor, "b d"], labels: Float[Tensor, "b c"], price: float) -> Float[Tensor, "b j i"]:
    """The critic's inputs at each step: class token, place and tokens left; labels; dense features; the shadow's prediction and fidelity
    before the step; the logarithm of lambda."""
    steps = len(episodes.drawings)
    briefs = [drawing.brief for drawing in episodes.drawings]
    own = torch.stack([torch.cat((brief.states[brief.rows.starts], brief.where), dim=1) for brief in briefs], dim=1)
    known = torch.cat((labels, F.layer_norm(features, features.shape[1:])), dim=1)[:, None].expand(-1, steps, -1)
    fidelity = episodes.fidelity[:, :-1, None]
    shared = torch.full_like(fidelity, math.log(price))
    return torch.cat((own, known, episodes.before.sigmoid(), fidelity, fidelity * price, shared), dim=2)


def rewards(episodes: Episodes, price: float) -> Float[Tensor, "b j"]:
    """Operations saved, and the credit at its price."""
    return episodes.saved + price * episodes.credit


def advantages(
    reward: Float[Tensor, "b j"], value: Float[Tensor, "b j"], trace: float
) -> tuple[Float[Tensor, "b j"], Float[Tensor, "b j"]]:
    """Generalised advantages over a finite horizon without discount, and the returns that the critic learns."""
    following = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), dim=1)
    surprise = reward + following - value
    found = torch.zeros_like(surprise)
    running = torch.zeros_like(surprise[:, 0])
    for j in reversed(range(surprise.shape[1])):
        running = surprise[:, j] + trace * running
        found[:, j] = running
    return found, found + value


def improve(
    actor: Actor, critic: Critic, optimiser: torch.optim.Optimizer, episodes: Episodes, inputs: Float[Tensor, "b j i"],
    reward: Float[Tensor, "b j"], recipe: Recipe,
) -> dict[str, float]:  # fmt: skip
    """A few epochs of clipped policy and value updates on one batch of episodes; what they came to, for the log."""
    with torch.no_grad():
        advantage, returns = advantages(reward, critic(inputs), recipe.trace)
        old = torch.stack([odds(actor, drawing).logp for drawing in episodes.drawings], dim=1)
        # where every gate is closed nothing differs, and noise is not to be made as large as a signal
        advantage = ((advantage - advantage.mean()) / advantage.std().clamp_min(0.01)).clamp(-4, 4)
        spread = returns.std().clamp_min(1e-3)
    told = {"moved": 0.0, "value": 0.0, "entropy": 0.0}
    for _ in range(recipe.epochs):
        now = [odds(actor, drawing) for drawing in episodes.drawings]
        logp, entropy = torch.stack([o.logp for o in now], dim=1), torch.stack([o.entropy for o in now], dim=1).mean()
        ratio = (logp - old).clamp(-20, 20).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - recipe.clip, 1 + recipe.clip) * advantage).mean()
        wrong = F.huber_loss(critic(inputs) / spread, returns / spread)
        optimiser.zero_grad()
        (0.5 * wrong - gain - recipe.entropy * entropy).backward()
        nn.utils.clip_grad_norm_(_parameters(optimiser), 1.0)
        optimiser.step()
        told = {"moved": float((ratio - 1).abs().mean().detach()), "value": float(wrong.detach()), "entropy": float(entropy.detach())}
    return told


def _parameters(optimiser: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimiser.param_groups for parameter in group["params"])
