"""LATTE: a verifier of STOP that reads what the backbone already knows, with no encoder and no pass of its own.

Published (EdgeVLN, arXiv 2609.35570, abstract): the Latent Trajectory Termination Extractor is a light causal transformer over the
backbone's hidden states that predicts the rank of the stop action.

Reconstruction, all of the rest: z_t = W h_t + emb(the action that the backbone proposes) + emb(min(step, 511)); 2 layers, norms first, 4
heads, each step seeing the last `window`; from the output p(stop) and two logits, for STOP and for the best other action, whose order is
STOP's rank r. Trained on whether the goal is near (cross-entropy, classes weighted) and by a margin between the two logits.

Letters: b rows, t steps, d width of the backbone, w width of the verifier. Action 0 is STOP.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.errors import ModelError

__all__ = ["STOP", "Opinion", "StopVerifier", "Trace", "VerifierConfig", "stop_loss"]

STOP = 0


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """`hidden` is the backbone's width, `actions` how many there are, STOP included. Raises ModelError where heads do not share evenly."""

    hidden: int
    actions: int
    width: int = 256
    layers: int = 2
    heads: int = 4
    window: int = 64
    steps: int = 512

    def __post_init__(self) -> None:
        if self.width % self.heads or min(self.window, self.steps) < 1 or self.actions < 2:
            raise ModelError(f"{self}: the width is shared by the heads, window and steps are at least 1, actions at least 2")


@dataclass(frozen=True, slots=True)
class Opinion:
    """Logits of p(stop), and of STOP and the best other action, at each step."""

    stop: Float[Tensor, "b t"]
    order: Float[Tensor, "b t 2"]

    @property
    def probability(self) -> Float[Tensor, "b t"]:
        """p(stop)."""
        return self.stop.float().sigmoid()

    @property
    def first(self) -> Bool[Tensor, "b t"]:
        """Whether STOP's rank is 0."""
        return self.order[..., 0] >= self.order[..., 1]


@dataclass(frozen=True, slots=True)
class Trace:
    """What the verifier remembers of an episode: each layer's keys and values of the last steps (n heads of e), and the steps so far."""

    layers: tuple[Float[Tensor, "2 b n t e"], ...] = ()
    count: int = 0


class TraceLayer(nn.Module):
    """Attention backwards over the window, then feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.heads, self.window, width = config.heads, config.window, config.width
        self.norm1, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "b t w"], before: Float[Tensor, "2 b n p e"]) -> tuple[Float[Tensor, "b t w"], Tensor]:
        """The stream after this layer, and the keys and values of the window that the next step sees."""
        b, t, _ = x.shape
        query, *new = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        known = torch.cat((before, torch.stack(new)), dim=3)
        size = known.shape[3]
        ages = torch.arange(size - t, size, device=x.device)[:, None] - torch.arange(size, device=x.device)
        seen = F.scaled_dot_product_attention(query, known[0], known[1], (ages >= 0) & (ages < self.window))
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        # the step itself is in the next one's window
        return x + self.mlp(self.norm2(x)), known[..., max(0, size - self.window + 1) :, :]


class StopVerifier(nn.Module):
    """Steps of an episode, or of whole episodes, to opinions; step by step gives what a whole pass gives."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_in = nn.Linear(config.hidden, config.width)
        self.action = nn.Embedding(config.actions, config.width)
        self.step = nn.Embedding(config.steps, config.width)
        self.layers = nn.ModuleList(TraceLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.stop_out, self.order_out = nn.Linear(config.width, 1), nn.Linear(config.width, 2)

    def forward(self, hidden: Float[Tensor, "b t d"], proposed: Int[Tensor, "b t"], trace: Trace = Trace()) -> tuple[Opinion, Trace]:
        """Go on from `trace` by t steps: the backbone's hidden states where it asks for an action, and the actions it proposes."""
        b, t, _ = hidden.shape
        dtype = self.hidden_in.weight.dtype
        steps = torch.arange(trace.count, trace.count + t, device=hidden.device).clamp_max(self.config.steps - 1)
        x = self.hidden_in(hidden.to(dtype)) + self.action(proposed) + self.step(steps)
        empty = x.new_zeros(2, b, self.config.heads, 0, self.config.width // self.config.heads)
        kept = []
        for number, layer in enumerate(self.layers):
            x, known = layer(x, trace.layers[number] if trace.layers else empty)
            kept.append(known)
        x = self.norm(x)
        return Opinion(self.stop_out(x)[..., 0], self.order_out(x)), Trace(tuple(kept), trace.count + t)


def stop_loss(
    opinion: Opinion, near: Bool[Tensor, "b t"], valid: Bool[Tensor, "b t"], weight: float, margin: float = 1.0
) -> Float[Tensor, ""]:
    """Cross-entropy to `near`, and what the right logit lacks of a lead by `margin`: mean over valid steps, near ones `weight` times."""
    sign = near.float() * 2 - 1
    crossed = F.binary_cross_entropy_with_logits(opinion.stop.float(), near.float(), reduction="none")
    lead = sign * (opinion.order[..., 0] - opinion.order[..., 1]).float()
    each = (crossed + (margin - lead).clamp_min(0)) * torch.where(near, weight, 1.0)
    return (each * valid).sum() / valid.sum().clamp_min(1)
