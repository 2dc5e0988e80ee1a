"""Text models: the decoder and the tokenizer of a checkpoint.

    decoder, tokenizer = load_decoder(Path("model.gguf"), torch.bfloat16)

One file per family, named as `config.json` names its `model_type`.
"""

import re
from pathlib import Path
from typing import Protocol, cast

import torch

from mmsdk import plugins
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.quant.types import Quantize
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.names import HUGGINGFACE, used
from mmsdk.weights.quantised import gguf_decoder, put_together
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["decoder_of", "load_decoder", "nested_decoder", "read_config", "read_decoder"]

PACKAGE = "mmsdk.models.text"


class Family(Protocol):
    """What a family's module offers."""

    def decoder_config(self, fields: Fields) -> DecoderConfig:
        """The decoder's config from the checkpoint's own settings; ModelError for what is not supported."""
        ...


def load_decoder(path: Path, dtype: torch.dtype, quantize: Quantize = "none") -> tuple[Decoder, TextTokenizer]:
    """The decoder and tokenizer of a GGUF file, or of a folder in the Hugging Face layout (config, safetensors, tokenizer.json).

    `quantize` stores the matrices in fewer bits, see `mmsdk.decoder.quantised`.
    Raises WeightsError for files that are missing or damaged, ModelError for a model that cannot be run.
    """
    if path.is_dir():
        folder = Folder.of(path)
        decoder, tokenizer = decoder_of(folder.config, folder.checkpoint, dtype, quantize), folder.tokenizer()
        tokenizer.fit(decoder.config.vocabulary, f"{path}: the tensor {HUGGINGFACE.embedding!r}")
        return decoder, tokenizer
    return gguf_decoder(path, dtype, quantize)


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder's config from a checkpoint's settings. Raises ModelError for an unknown family or an unsupported setting."""
    kind = fields.text("model_type")
    if kind not in plugins.available(PACKAGE):
        raise ModelError(f"{fields.where}: the family {kind!r} is not supported; supported: {', '.join(plugins.available(PACKAGE))}")
    _refuse(fields)
    return cast(Family, plugins.find(PACKAGE, kind)).decoder_config(fields)


def decoder_of(fields: Fields, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder of settings and of tensors that are named as a text model alone names them ("model.layers...", "lm_head.weight").

    Raises ModelError for a family or a setting that is not supported, and for tensors, all of them named, that are missing or left over.
    """
    config = read_config(fields)
    head = f"|{re.escape(HUGGINGFACE.head)}" if config.tied else ""
    checkpoint.fit(used(HUGGINGFACE, config), "the decoder of its config", rf".*\.inv_freq{head}")
    return put_together(HUGGINGFACE, config, checkpoint, dtype, quantize)


def nested_decoder(folder: Folder, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder within a larger model, by the `text_config` of its settings; its tensors are named as in `decoder_of`.

    Checkpoints say in several places, and not always truly, whether the head is tied to the embedding: it is where none is stored, unless
    all of them deny it.
    """
    text, stated = folder.config.group("text_config"), "tie_word_embeddings"
    told = [one.flag(stated) for one in (text, folder.config) if one.has(stated)]
    tied = HUGGINGFACE.head not in checkpoint.files and (any(told) or not told)
    values = {"model_type": "llama", **text.values, stated: tied}
    return decoder_of(Fields(text.where, values), checkpoint, dtype, quantize)


def read_decoder(folder: Path, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder of a folder. Raises as `load_decoder` does, also for tensors that are left over."""
    return decoder_of(read_fields(folder / "config.json"), open_checkpoint(folder), dtype, quantize)


def _refuse(fields: Fields) -> None:
    """What every family may ask for and no decoder of ours does."""
    if fields.has("quantization_config"):
        raise ModelError(f"{fields.where}: quantised checkpoints (quantization_config) are not supported")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "'silu'")
    if fields.flag("use_sliding_window", default=False):
        raise ModelError(f"{fields.where}: sliding-window attention (use_sliding_window) is not supported")
