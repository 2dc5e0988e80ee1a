"""A flow head behind a vision-language model of ours: pictures and instruction go through the pipeline's own stages, compression included.

    pipe = mmsdk.pipeline("checkpoints/paligemma")                       # any family, any size
    head = FlowHead(Pi0(Pi0Config(expert)), dims=7)                      # an expert with as many layers, and heads as wide
    model = PromptedModel(pipe.vlm, head, ("top", "wrist"), compress="simplecluster:0.25")
    policy = load_policy(model, contract, robot, normalization)

Every method that compresses a picture for an answer compresses it for an action: inside the encoder, behind it, and inside the decoder,
whose thinned layers the expert reads as they are. The prompt is the family's own; in front of PaliGemma's parts it is pi0's.
"""

from dataclasses import dataclass, field, replace

import torch

from mmsdk.compress import Compression, CompressionSpec, compression
from mmsdk.errors import InputError
from mmsdk.models.types import VLM
from mmsdk.stages import Clock, Context, device_of, prepare
from mmsdk.vla.chunking.rtc import Anew, Chunking
from mmsdk.vla.heads.flow import FlowHead
from mmsdk.vla.types import ActionChunk, Effort, Observation, Request

__all__ = ["PromptedModel"]


@dataclass(frozen=True, slots=True)
class PromptedModel:
    """A `mmsdk.vla.policy.Model`: normalised in, normalised out, at the head's own width.

    `cameras` are shown in this order, as they are; the model resizes them as it does any picture. Of each, `compress` says what is kept. At
    a lower effort the flow is walked in `fewer` steps. Raises PluginError and BudgetError for compression that cannot be.
    """

    vlm: VLM
    head: FlowHead
    cameras: tuple[str, ...]
    compress: CompressionSpec = "identity"
    chunking: Chunking = Anew()
    fewer: int = 4
    _steps: Compression = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_steps", compression(self.compress))

    def reset(self, episode: int) -> None:
        """Nothing is remembered between requests."""

    @torch.no_grad()
    def __call__(self, request: Request) -> ActionChunk:
        """A chunk for the request. Raises InputError for a camera that is missing, a prompt that is too long, and as the pipeline does."""
        observation, network = request.observation, self.head.network
        context = self.seen(observation)
        guide = self.chunking.guide(request.pending, request.delay, (network.chunk, network.action_dim))
        head = replace(self.head, steps=min(self.fewer, self.head.steps)) if request.effort <= Effort.FEWER_STEPS else self.head
        return ActionChunk(head.guided(context, observation, guide, request.noise), observation.stamp, producer=self.vlm.name)

    def seen(self, observation: Observation) -> Context:
        """What the decoder knows after the pictures and the instruction."""
        if missing := [name for name in self.cameras if name not in observation.images]:
            there = ", ".join(observation.images) or "none"
            raise InputError(f"no picture of {', '.join(missing)}; there is {there}", item="cameras")
        pictures = [observation.images[name] for name in self.cameras]
        prepared = prepare(self.vlm, self._steps, [(pictures, observation.instruction)], 1, Clock(device_of(self.vlm)))
        for error in prepared.errors.values():
            raise error
        assert prepared.context is not None, "a row without an error has a context"
        return prepared.context
