"""mini put together: sight by DINOv2-small, a trained projector, words by SmolLM2-135M with a trained update merged in.

The prompt is the begin token, the embeddings of every picture and clip one after another, then the question as ordinary text, in the
words of `asked`. Positions count what is really there, also after compression.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.decoder.native import hasten
from mmsdk.decoder.quantised import quantise
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.models.mini.adapter import Adapter, changed, merge, read_adapter
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import ADAPTER, BOS, EOS, MARKERS, conversation
from mmsdk.models.types import Tokenizer
from mmsdk.prompt import Ids, Layout, Prompt, Slot
from mmsdk.quant.types import Quantize
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import brief
from mmsdk.vision.vit import ViT
from mmsdk.vision.weights import vit_from_onnx
from mmsdk.weights.bundle import Bundle, bundle, pull
from mmsdk.weights.quantised import gguf_decoder

__all__ = ["Mini", "load", "load_parts"]


@dataclass(frozen=True, slots=True)
class Mini:
    """The parts; see `mmsdk.models.types.VLM`."""

    name: str
    encoder: Encoder
    projector: Projector
    decoder: Decoder
    tokenizer: Tokenizer
    context: int
    stop_ids: frozenset[int] = frozenset({EOS})

    def __repr__(self) -> str:
        return brief(self)

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """Project features with their places; all inputs in one pass."""
        return self.projector.connect(tokens)

    def layout(self, prompt: Prompt) -> Layout:
        """Begin token, sight, then the question, or the conversation."""
        slots = [Slot(i) for i in range(len(prompt.media))]
        words = self.tokenizer.encode(conversation([(turn.role, turn.text) for turn in prompt.turns]))
        return Layout((Ids((BOS,)), *slots, Ids(tuple(words))), media=len(slots))


def load(name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, quantize: Quantize = "none") -> Mini:
    """mini as it ships, or with the adapter in a folder that training wrote.

    Raises WeightsError where the encoder or language model cannot be had, ModelError where the adapter does not fit them.
    """
    if folder is None:
        return load_parts(bundle("mini"), dtype, device, name, quantize)
    parts = pull("mini")
    return load_parts(Bundle(parts["encoder"], parts["language"], folder / ADAPTER), dtype, device, name, quantize)


def load_parts(parts: Bundle, dtype: torch.dtype, device: torch.device, name: str = "mini", quantize: Quantize = "none") -> Mini:
    """mini from its three files. The update is merged in float32 before the weights become `dtype` or are quantised.

    What no update changes is quantised as it is read, and taken over from the file's own blocks where they are int4.
    """
    adapter = read_adapter(parts.adapter)
    decoder, tokenizer = gguf_decoder(parts.language, torch.float32, quantize, changed(adapter))
    merge(decoder.layers, adapter)
    quantise(decoder, quantize)
    for marker, expected in MARKERS.items():
        if tokenizer.special(marker) != expected:
            raise ModelError(f"{parts.language}: {marker} is token {tokenizer.special(marker)}, mini was trained with {expected}")
    backbone = _backbone(vit_from_onnx(parts.encoder).to(device, dtype), adapter)
    decoder = decoder.to(device, dtype)
    hasten(decoder)
    return Mini(
        name=name,
        encoder=Encoder(backbone, Preprocess()),
        projector=_projector(adapter, backbone.width, decoder.config.width).to(device, dtype),
        decoder=decoder,
        tokenizer=tokenizer,
        context=decoder.config.context,
    )


def _backbone(vit: ViT, adapter: Adapter) -> Dinov2:
    """The encoder as the projector reads it, with the layers that the adapter names beside the last one."""
    for layer in adapter.middle:
        if not 0 <= layer < vit.config.layers:
            raise ModelError(f"{adapter.path}: its projector reads layer {layer} of the encoder, which has {vit.config.layers}")
    return Dinov2(vit, adapter.middle)


def _projector(adapter: Adapter, vision: int, language: int) -> Projector:
    """The projector from features `vision` wide to embeddings `language` wide, as wide inside as its tensors say."""
    bias = adapter.projector.get("up.bias")
    with torch.device("meta"):
        projector = Projector(ProjectorConfig(vision, max(1, bias.numel() if bias is not None else 1), language))
    wanted = projector.state_dict()
    for name in sorted(wanted.keys() ^ adapter.projector.keys()):
        raise ModelError(f"{adapter.path}: projector.{name} is {'missing' if name in wanted else 'no tensor of the projector'}")
    for name, tensor in adapter.projector.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(
                f"{adapter.path}: projector.{name} is {tuple(tensor.shape)}, it must be {tuple(wanted[name].shape)} to join features "
                f"{vision} wide to embeddings {language} wide"
            )
    projector.load_state_dict({name: tensor.float() for name, tensor in adapter.projector.items()}, assign=True)
    return projector.eval().requires_grad_(False)
