"""PaliGemma (arXiv 2407.07726): SigLIP, one matrix and Gemma, which reads pictures and question in both directions.

There is no chat: pictures come first, then the begin token, the question as it is ("caption en", "detect cat"), and the end of the line.
The model has no clips of its own: the frames of one are seen as pictures, one after another in one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmsdk.decoder.transformer import Decoder
from mmsdk.models.text import nested_decoder
from mmsdk.models.types import Connector
from mmsdk.prompt import Ids, Layout, Prompt, Slot, Span, Text
from mmsdk.quant.types import Quantize
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.states import States
from mmsdk.vision.projector import Projected
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import brief
from mmsdk.weights.folder import Folder
from mmsdk.weights.llava import language_of, renamed, tower_of
from mmsdk.weights.modules import filled
from mmsdk.weights.pictures import HALVES, prepare_of

__all__ = ["PaliGemma", "load"]

_PROJECTOR = "model.multi_modal_projector."


class _Projector(nn.Module):
    """One matrix, under the name of checkpoints."""

    def __init__(self, vision: int, language: int) -> None:
        super().__init__()
        self.linear = nn.Linear(vision, language)

    def forward(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n e"]:
        """Width d in, width e out."""
        embeddings: Tensor = self.linear(x)
        return embeddings


@dataclass(frozen=True, slots=True)
class PaliGemma:
    """The parts; see `mmsdk.models.types.VLM`. `begin` is the id that stands behind the last picture."""

    name: str
    encoder: Encoder
    connector: Connector
    decoder: Decoder
    tokenizer: TextTokenizer
    begin: int
    stop_ids: frozenset[int]

    def __repr__(self) -> str:
        return brief(self)

    @property
    def context(self) -> int:
        """The longest sequence that the decoder was made for."""
        return self.decoder.config.context

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """See `VLM`."""
        return self.connector(tokens)

    def layout(self, prompt: Prompt) -> Layout:
        """Segments in their order, the begin token behind the last picture, and the end of the line."""
        media = iter(range(len(prompt.media)))
        last = max((place for place, one in enumerate(prompt.segments) if not isinstance(one, Text)), default=-1)
        spans: list[Span] = []
        for segment in prompt.segments[: last + 1]:
            spans.append(Ids(self._ids(segment.content, not spans)) if isinstance(segment, Text) else Slot(next(media)))
        asked = "".join(one.content for one in prompt.segments[last + 1 :] if isinstance(one, Text))
        return Layout((*spans, Ids((self.begin, *self._ids(f"{asked}\n", begins=False)))), len(prompt.media))

    def _ids(self, text: str, begins: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, begins=begins))


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> PaliGemma:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    found = found.with_text("gemma")
    checkpoint = renamed(found)
    decoder = nested_decoder(found, language_of(checkpoint), dtype, quantize, sees="prompt").to(device)
    vit = tower_of(found, checkpoint, "siglip_vision_model", dtype, device)
    prepare = prepare_of(found.pictures, vit.config.patch, vit.config.grid * vit.config.patch, HALVES)
    with torch.device("meta"):
        projector = _Projector(vit.config.width, decoder.config.width)
    tokenizer = found.tokenizer()
    tokenizer.fit(decoder.config.vocabulary, f"{found.path}: the embedding")
    return PaliGemma(
        name=name,
        encoder=Encoder(States(vit), prepare, frame_pool=1),
        connector=Projected(filled(projector, checkpoint.under(_PROJECTOR), dtype, device, "the projector")),
        decoder=decoder,
        tokenizer=tokenizer,
        begin=tokenizer.special(found.token("bos_token", "<bos>")),
        stop_ids=found.stop_ids,
    )
