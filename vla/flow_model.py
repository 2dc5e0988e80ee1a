"""A flow head with its eyes: pictures, instruction and state to a normalised chunk, joined to what is being executed.

parts = load_pi0(Path("pi0_base"))
model = FlowModel(parts.paligemma, FlowHead(parts.network, dims=32), tokenizer, "pi0", ("base_0_rgb", "left_wrist_0_rgb"))
policy = load_policy(model, contract_of_the_checkpoint, contract_of_the_robot, normalization)
"""

from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.models.types import Codec
from mmsdk.stages import Context
from mmsdk.vision.types import Image
from mmsdk.vla.chunking.rtc import Anew, Chunking
from mmsdk.vla.heads.flow import FlowHead
from mmsdk.vla.heads.state import pi0_prompt, pi05_prompt
from mmsdk.vla.types import ActionChunk, Effort, Observation, Request

__all__ = ["FlowModel", "Sight"]


@runtime_checkable
class Sight(Protocol):
    """What makes the prefix: `PaliGemma` or `SmolVLM` of `mmsdk.vla.heads`."""

    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int,
    ) -> Context: ...


@dataclass(frozen=True, slots=True)
class FlowModel:
    """A policy network without a robot, as `mmsdk.vla.policy.RobotPolicy` takes one: normalised in, normalised out, at its own width.

    `cameras` are the model's, in its order, each `side` x `side`; those in `absent` are black and seen by nothing (pi0's rule). `start`
    are the ids before the prompt, of which there are `limit` at most. pi0.5 is told the first `state_dims` numbers of the state. At a lower
    effort the flow is walked in `fewer` steps.
    """

    sight: Sight
    head: FlowHead
    tokenizer: Codec
    wording: Literal["pi0", "pi05", "smolvla"]
    cameras: tuple[str, ...]
    side: int = 224
    start: tuple[int, ...] = (2,)
    limit: int = 48
    state_dims: int = 32
    absent: tuple[str, ...] = ()
    chunking: Chunking = Anew()
    fewer: int = 4

    def reset(self, episode: int) -> None:
        """Nothing is remembered between requests."""

    @torch.no_grad()
    def __call__(self, request: Request) -> ActionChunk:
        """A chunk for the request.

        Raises InputError for a camera that is missing or of another size, and for a prompt that is too long: it is never cut.
        """
        observation, network = request.observation, self.head.network
        ids = torch.tensor([self._ids(observation)])
        present = torch.tensor([[name not in self.absent for name in self.cameras]])
        context = self.sight.prefix(self._pixels(observation), present, ids, torch.ones_like(ids, dtype=torch.bool), 1)
        guide = self.chunking.guide(request.pending, request.delay, (network.chunk, network.action_dim))
        head = replace(self.head, steps=min(self.fewer, self.head.steps)) if request.effort <= Effort.FEWER_STEPS else self.head
        return ActionChunk(head.guided(context, observation, guide, request.noise), observation.stamp, producer=self.wording)

    def _pixels(self, observation: Observation) -> Float[Tensor, "1 c 3 h w"]:
        missing = [name for name in self.cameras if name not in observation.images]
        if missing:
            there = ", ".join(observation.images) or "none"
            raise InputError(
                f"no picture of {', '.join(missing)}; there is {there}, the model sees {', '.join(self.cameras)}", item="cameras"
            )
        return torch.stack([self._scaled(name, observation.images[name]) for name in self.cameras])[None]

    def _scaled(self, name: str, image: Image) -> Float[Tensor, "3 h w"]:
        if image.size != (self.side, self.side):
            raise InputError(f"a picture of {image.size}, the model sees {self.side} x {self.side}", item=f"camera {name}")
        return image.pixels.float() / 127.5 - 1

    def _ids(self, observation: Observation) -> list[int]:
        ids = [*self.start, *(token for part in self._parts(observation) for token in self.tokenizer.encode(part))]
        if len(ids) > self.limit:
            raise InputError(f"the prompt has {len(ids)} tokens, the model was made for {self.limit}; say it shorter", item="instruction")
        return ids

    def _parts(self, observation: Observation) -> tuple[str, ...]:
        """What is tokenised piece by piece: pi0's last newline does not melt into what precedes it."""
        if self.wording == "pi05":
            return (pi05_prompt(observation.instruction, observation.state[: self.state_dims]),)
        if self.wording == "pi0":
            return pi0_prompt(observation.instruction)[:-1], "\n"
        return (observation.instruction.removesuffix("\n") + "\n",)
