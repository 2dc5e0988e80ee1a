"""mini's own eyes and words as the prefix of a small policy: its image encoder, its word embeddings, and a `Glance` at both.

The encoder and the embeddings are those of the default vision-language model as they ship, and are not trained further; what is learned is
small. A compressor may work between encoder and glance, as in a pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mmsdk.compress import Compression
from mmsdk.errors import InputError
from mmsdk.models.mini.projector import place_features
from mmsdk.stages import Context
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.types import Image, VisualTokens
from mmsdk.vla.heads.glance import Glance
from mmsdk.vla.heads.prefix import prefill_blocks
from mmsdk.weights.gguf_file import GGUFTensor, read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of
from mmsdk.weights.names import GGUF

__all__ = ["Lexicon", "MiniSight", "standing"]


@dataclass(frozen=True, slots=True)
class Lexicon:
    """A language model's tokenizer and the embeddings of its words, of which only those that are said are read from the file."""

    tokenizer: TextTokenizer
    table: GGUFTensor

    @classmethod
    def of(cls, path: Path) -> "Lexicon":
        """That of a GGUF file. Raises WeightsError for a damaged one."""
        file = read_file(path)
        return cls(tokenizer_of(file.metadata), file.tensors[GGUF.embedding])

    def __call__(self, ids: Int[Tensor, "b s"]) -> Float[Tensor, "b s e"]:
        """The embeddings of token ids."""
        rows = ids.flatten()
        out = torch.empty(len(rows), self.table.shape[1])
        GGUFTensor(self.table.name, tuple(out.shape), self.table.kind, self.table.data[rows]).read(out)
        embedded: Tensor = out.unflatten(0, ids.shape)
        return embedded


def standing(tokens: VisualTokens, camera: int, cameras: int) -> Float[Tensor, "n p"]:
    """Where each token stands: its place in the picture as the projector of mini is told it, and of which camera it is."""
    which = F.one_hot(torch.full((len(tokens),), camera), cameras)
    return torch.cat((place_features(tokens), which), dim=1)


@dataclass(frozen=True, slots=True)
class MiniSight:
    """A `mmsdk.vla.flow_model.Sight`. `compression` steps work on the encoder's features, camera by camera.

    Raises InputError for steps that would need more than these.
    """

    encoder: Encoder
    glance: Glance
    lexicon: Lexicon
    compression: Compression = Compression()

    def __post_init__(self) -> None:
        if self.compression.before != self.compression or self.compression.inside_encoder or self.compression.asks:
            raise InputError(
                "a robot policy keeps fewer of the tokens behind the encoder, by methods that need neither projector nor question",
                item="compression",
            )

    @torch.no_grad()
    def prefix(
        self,
        pixels: Float[Tensor, "b c 3 h w"],
        present: Bool[Tensor, "b c"],
        ids: Int[Tensor, "b s"],
        said: Bool[Tensor, "b s"],
        room: int = 0,
    ) -> Context:
        """What the decoder knows after c camera images in [-1, 1] and the words `ids` where `said`; a camera that is not `present` is seen
        by nothing."""
        cameras = pixels.shape[1]
        bytes_of = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).flatten(0, 1)
        seen = [each.tokens for each in self.compression(self.encoder([Image(each) for each in bytes_of]))]
        tokens, places, shown = self._together(seen, present, cameras)
        gleaned = self.glance(tokens, places, shown, self.lexicon(ids), said)
        valid = torch.ones(gleaned.embeddings.shape[:2], dtype=torch.bool)
        return prefill_blocks(self.glance.decoder, gleaned.embeddings, valid, torch.zeros(valid.shape[1], dtype=torch.bool), room)

    def _together(self, seen: Sequence[VisualTokens], present: Tensor, cameras: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of all cameras of a row side by side, filled up to the longest camera."""
        most = max(map(len, seen))
        fill = [most - len(each) for each in seen]
        reduced = [F.pad(self.glance.reduced(each.features), (0, 0, 0, more)) for each, more in zip(seen, fill, strict=True)]
        places = [
            F.pad(standing(each, i % cameras, cameras), (0, 0, 0, more)) for i, (each, more) in enumerate(zip(seen, fill, strict=True))
        ]
        there = torch.arange(most) < torch.tensor([len(each) for each in seen])[:, None]
        rows = len(seen) // cameras
        shown = (there.view(rows, cameras, most) & present[:, :, None]).flatten(1)
        return torch.stack(reduced).view(rows, cameras * most, -1), torch.stack(places).view(rows, cameras * most, -1), shown
