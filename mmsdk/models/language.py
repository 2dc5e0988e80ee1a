"""Language models alone: any family of `mmsdk.models.text` as a pipeline that is asked without pictures.

    pipe = pipeline("image-text-to-text", "org/some-text-model")
    pipe([], "What is the capital of France?")
    pipe = pipeline(model="some-text-model.gguf")               # settings, tokenizer and template are the file's own

A question is one turn of the checkpoint's own chat template. Where it has none it is a base model, which goes on with what it is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.encoded import Encoded
from mmsdk.errors import InputError
from mmsdk.models.text import folder_decoder, load_decoder
from mmsdk.models.types import Assembled
from mmsdk.prompt import Slot
from mmsdk.quant.types import Quantize
from mmsdk.template import Piece, Template
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.types import Media, VisualTokens
from mmsdk.weights.folder import Folder
from mmsdk.weights.gguf_talk import talk_in

__all__ = ["Blind", "blind", "load", "load_file"]

_AS_IT_IS = "{{ messages[-1]['content'] }}"


@dataclass(frozen=True, slots=True)
class Blind:
    """A `VisionEncoder` of a model without sight: it can encode nothing, and says so. `width` is the language model's."""

    width: int

    def count(self, size: tuple[int, int], frames: int = 1) -> int:
        """Raises InputError."""
        raise self._blind()

    def __call__(self, media: Sequence[Media]) -> list[VisualTokens]:
        """Nothing of nothing. Raises InputError, with its place, for anything else."""
        if media:
            raise self._blind(media[0].source, 0)
        return []

    def _blind(self, item: str = "media", index: int | None = None) -> InputError:
        return InputError("this model reads text only; ask it with [] in the place of pictures", item=item, index=index)


def load(name: str, found: Folder, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a folder. Raises WeightsError for files that are missing or damaged, ModelError for what cannot be run."""
    decoder = folder_decoder(found, dtype, quantize).to(device)
    tokenizer = found.tokenizer()
    tokenizer.fit(decoder.config.vocabulary, f"{found.path}: the embedding")
    return blind(name, decoder, tokenizer, found.talk, found.names, found.stop_ids)


def load_file(name: str, path: Path, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Assembled:
    """The model of a GGUF file, with nothing beside it. Raises as `load_decoder` and `talk_in` do."""
    talk = talk_in(path)
    decoder, tokenizer = load_decoder(path, dtype, quantize)
    return blind(name, decoder.to(device), tokenizer, talk.template, talk.names, talk.stop_ids)


def blind(
    name: str, decoder: Decoder, tokenizer: TextTokenizer, talk: str, names: Mapping[str, str], stop_ids: frozenset[int]
) -> Assembled:
    """A decoder as a model that is asked without pictures. `talk` is its chat template, "" for one that goes on with what it is given."""
    # what a chat template writes is all there is; around a text as it is stand the ids that the vocabulary asks for
    template = Template(name, talk or _AS_IT_IS, tokenizer, names, plain=True, around=not talk)
    return Assembled(name, Blind(decoder.config.width), _nothing, decoder, template, _stands, stop_ids)


def _nothing(tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
    """The embeddings of no input at all."""
    assert not tokens, "a model without sight encodes nothing"
    return []


def _stands(number: int, item: Media | Encoded) -> list[Piece]:
    return [Slot(number)]
