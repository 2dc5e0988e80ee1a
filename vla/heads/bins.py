"""256 bins: one token for every number of an action, the last of the vocabulary (OpenVLA, arXiv 2406.09246) [published].

Numbers are clipped to [-1, 1] and put between 256 even edges; bin k is said as the token vocabulary - k and decoded as the middle between
edges k and k + 1. Both outermost edges count as bins of their own, so that 256 ids share 255 middles.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.stages import Context
from mmsdk.vla.types import ActionChunk, Observation

__all__ = ["BinCodec", "BinHead"]

_BINS = 256


@dataclass(frozen=True, slots=True)
class BinCodec:
    """Numbers to ids and back; `vocabulary` counts the words without padding."""

    vocabulary: int = 32_000

    def encode(self, actions: Float[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """Ids of numbers. Raises InputError where one is not finite."""
        if not bool(actions.isfinite().all()):
            raise InputError("they are not finite", item="actions")
        edges = torch.linspace(-1, 1, _BINS, dtype=torch.float64, device=actions.device)
        return self.vocabulary - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)

    def decode(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Numbers of ids. Raises InputError for an id that is no action's: upstream takes any word for the largest action."""
        lowest, highest = self.vocabulary - _BINS, self.vocabulary - 1
        if bool(((ids < lowest) | (ids > highest)).any()):
            raise InputError(f"{ids.flatten().tolist()} are not all from {lowest} to {highest}, the tokens of actions", item="tokens")
        edges = torch.linspace(-1, 1, _BINS, dtype=torch.float64, device=ids.device)
        middles = (edges[:-1] + edges[1:]) / 2
        return middles[(self.vocabulary - ids - 1).clamp(0, _BINS - 2)].float()


@dataclass(frozen=True, slots=True)
class BinHead:
    """An `ActionHead` that says one action, number by number, the likeliest token that stands for an action.

    `lead` is said first: OpenVLA was trained with token 29871 (an empty word) between the prompt and the action. The prompt is given
    without it.
    """

    decoder: Decoder
    dims: int
    codec: BinCodec = BinCodec()
    lead: int = 29_871

    @torch.no_grad()
    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """A chunk of one action for one row. Raises ModelError where the decoder's logits are not finite: none of them is likeliest."""
        cache, lowest = context.cache.fork(), self.codec.vocabulary - _BINS
        token, said = torch.full((1, 1), self.lead, device=context.hidden.device), list[Tensor]()
        for _ in range(self.dims):
            hidden = self.decoder(self.decoder.embed(token), cache.position[:, None], cache)[:, -1]
            logits = self.decoder.logits(hidden)[:, lowest : self.codec.vocabulary]
            if not bool(logits.isfinite().all()):
                raise ModelError(f"bins: logits of number {len(said)} of the action are not finite; no token is likeliest")
            token = logits.argmax(-1, keepdim=True) + lowest
            said.append(token)
        return ActionChunk(self.codec.decode(torch.cat(said, dim=1)).to(observation.state.device), observation.stamp, producer="bins")
