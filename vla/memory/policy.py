"""A flow model with a dual memory, as a policy: which step it takes is for the loop to say, by the parts whose turn it is.

memory = DualMemory(decoder, Refiner(decoder.config, BlockLayout()), MemoryConfig(period=3.0))
model = DualModel(eyes, memory, expert, tokenizer, cameras, dims=14)
loop = ControlLoop(robot, load_policy(model, ...), hz=25, pace=Pace(expert=25, adapter=25, vlm=75))

A request in which "vlm" is due is a slow step, one in which "adapter" is due a fast one; where neither is, the expert acts on the last view
again. Times are the observations' own, in seconds, and so is the memory's period. A request that is refused, fails on the way or ends in
actions that are not finite has never been seen: the memory is as it was.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import SafetyError
from mmsdk.models.types import Codec
from mmsdk.stages import Context
from mmsdk.vla.chunking.rtc import Anew, Chunking
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.heads.flow import FlowHead
from mmsdk.vla.memory.dual import DualMemory, Turn
from mmsdk.vla.memory.expert import DualExpert, Watched
from mmsdk.vla.memory.scores import Tally
from mmsdk.vla.types import ActionChunk, Request

__all__ = ["DualModel", "Eyes"]


@runtime_checkable
class Eyes(Protocol):
    """What turns pictures into visual tokens of the decoder's width: `PaliGemma` or `SmolVLM` of `mmsdk.vla.heads`."""

    def see(self, pixels: Float[Tensor, "b c 3 h w"]) -> Float[Tensor, "b n d"]: ...


@dataclass(slots=True)
class _Step:
    """A `Sight` for one request: it asks the memory instead of the decoder, and keeps what the memory answered."""

    eyes: Eyes
    memory: DualMemory
    due: frozenset[str]
    time: float
    turn: Turn = field(init=False)

    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int,
    ) -> Context:
        """What the expert acts on this time."""
        device = self.memory.decoder.embedding.weight.device
        present, ids, said = present.to(device), ids.to(device), said.to(device)
        if "vlm" in self.due or not self.memory.started:
            self.turn = self.memory.slow(self.time, self.eyes.see(pixels.to(device)), present, ids, said)
        elif "adapter" in self.due and self.memory.config.refine:
            self.turn = self.memory.fast(self.time, self.eyes.see(pixels.to(device)), present)
        else:
            self.turn = self.memory.again()
        return self.turn.context


@dataclass(frozen=True, slots=True)
class DualModel:
    """A policy network without a robot, as `mmsdk.vla.policy.RobotPolicy` takes one; see `FlowModel` for what the fields mean.

    The instruction is told as pi0's is, for the state is a token of the expert's. Of the expert's numbers `dims` are actions. Requests and
    resets of several threads wait for one another.
    """

    eyes: Eyes
    memory: DualMemory
    network: DualExpert
    tokenizer: Codec
    cameras: tuple[str, ...]
    dims: int
    steps: int = 10
    side: int = 224
    start: tuple[int, ...] = (2,)
    absent: tuple[str, ...] = ()
    chunking: Chunking = Anew()
    fewer: int = 4

    def reset(self, episode: int) -> None:
        """A new episode begins: the memory forgets."""
        self.memory.reset()

    @torch.no_grad()
    def __call__(self, request: Request) -> ActionChunk:
        """A chunk for the request. Raises InputError as `FlowModel` does, and SafetyError for actions that are not finite."""
        observation, tally = request.observation, Tally()
        step = _Step(self.eyes, self.memory, request.due, observation.stamp.captured)
        model = FlowModel(
            step,
            FlowHead(Watched(self.network, tally), self.dims, self.steps),
            self.tokenizer,
            "pi0",
            self.cameras,
            self.side,
            self.start,
            limit=self.memory.layout.words,
            absent=self.absent,
            chunking=self.chunking,
            fewer=self.fewer,
        )
        with self.memory.acting():
            chunk = model(request)
            if not bool(chunk.actions.isfinite().all()):
                raise SafetyError("the actions are not finite; what led to them is not remembered")
            self.memory.close(step.turn, tally)
        return replace(chunk, producer=f"d2 {step.turn.consumer}")
