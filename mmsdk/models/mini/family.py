"""mini put together: sight by DINOv2-small, a trained projector, words by SmolLM2-135M with a trained update merged in.

The prompt is the begin token, the embeddings of every picture and clip one after another, then the question as ordinary text:
"Question: ...", a new line, "Answer:". Positions count what is really there, also after compression.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.models.mini.adapter import merge, read_adapter
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.types import Tokenizer
from mmsdk.prompt import Ids, Layout, Prompt, Slot
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.weights import vit_from_onnx
from mmsdk.weights.bundle import Bundle, bundle, pull
from mmsdk.weights.gguf import read_gguf

__all__ = ["ADAPTER", "Mini", "load", "load_parts"]

ADAPTER = "mini_adapter.safetensors"
BOS, EOS = 1, 2  # <|im_start|> and <|im_end|>, as training used them


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

    def connect(self, tokens: Sequence[VisualTokens]) -> list[Float[Tensor, "_ d"]]:
        """Project features with their places; all inputs in one pass."""
        return self.projector.connect(tokens)

    def layout(self, prompt: Prompt) -> Layout:
        """Begin token, sight, then the question."""
        slots = [Slot(i) for i in range(len(prompt.media))]
        words = self.tokenizer.encode(f"Question: {prompt.text}\nAnswer:")
        return Layout((Ids((BOS,)), *slots, Ids(tuple(words))), media=len(slots))


def load(name: str, folder: Path | None, dtype: torch.dtype, device: torch.device) -> Mini:
    """mini as it ships, or with the adapter in a folder that training wrote.

    Raises WeightsError where the encoder or language model cannot be had, ModelError where the adapter does not fit them.
    """
    if folder is None:
        return load_parts(bundle("mini"), dtype, device, name)
    parts = pull("mini")
    return load_parts(Bundle(parts["encoder"], parts["language"], folder / ADAPTER), dtype, device, name)


def load_parts(parts: Bundle, dtype: torch.dtype, device: torch.device, name: str = "mini") -> Mini:
    """mini from its three files. The update is merged in float32 before the weights become `dtype`."""
    adapter = read_adapter(parts.adapter)
    config, state, tokenizer = read_gguf(parts.language, torch.float32)
    decoder = Decoder.of(config, state)
    merge(decoder.layers, adapter)
    for marker, expected in (("<|im_start|>", BOS), ("<|im_end|>", EOS)):
        if tokenizer.special(marker) != expected:
            raise ModelError(f"{parts.language}: {marker} is token {tokenizer.special(marker)}, mini was trained with {expected}")
    return Mini(
        name=name,
        encoder=Encoder(Dinov2(vit_from_onnx(parts.encoder).to(device, dtype), adapter.middle), Preprocess()),
        projector=_projector(adapter.projector, parts.adapter).to(device, dtype),
        decoder=decoder.to(device, dtype),
        tokenizer=tokenizer,
        context=config.context,
    )


def _projector(state: Mapping[str, Tensor], path: Path) -> Projector:
    """The projector of the widths that its tensors have."""
    try:
        hidden, inputs = state["up.weight"].shape
        projector = Projector(ProjectorConfig(inputs - Projector.places, hidden, len(state["down.weight"])))
        projector.load_state_dict(state)
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{path} does not hold mini's projector: {error}") from error
    return projector.eval().requires_grad_(False)
