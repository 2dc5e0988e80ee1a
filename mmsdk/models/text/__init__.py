"""Text models: the decoder and the tokenizer of a checkpoint.

    decoder, tokenizer = load_decoder(Path("model.gguf"), torch.bfloat16)

One file per family, named as `config.json` names its `model_type`.
"""

from pathlib import Path
from typing import Protocol, cast

import torch
from tokenizers import Tokenizer as Backend

from mmsdk import plugins
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.quant.types import Quantize
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.names import HUGGINGFACE, used
from mmsdk.weights.quantised import gguf_decoder, put_together
from mmsdk.weights.safetensors import open_checkpoint

__all__ = ["load_decoder", "read_config", "read_decoder", "read_tokenizer"]

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
        decoder, tokenizer = read_decoder(path, dtype, quantize), read_tokenizer(path)
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


def read_decoder(folder: Path, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder of a folder. Raises as `load_decoder` does, also for tensors that are left over."""
    config, checkpoint = read_config(read_fields(folder / "config.json")), open_checkpoint(folder)
    spare = {HUGGINGFACE.head} if config.tied else set()
    unknown = sorted(name for name in checkpoint.files.keys() - used(HUGGINGFACE, config) - spare if not name.endswith(".inv_freq"))
    if unknown:
        raise ModelError(f"{folder} holds a tensor {unknown[0]!r} that the decoder of its config has no use for")
    return put_together(HUGGINGFACE, config, checkpoint, dtype, quantize)


def read_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a folder. Raises WeightsError where `tokenizer.json` is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WeightsError(f"{folder} has no tokenizer.json")
    try:
        return TextTokenizer(Backend.from_file(str(path)))
    except Exception as error:  # tokenizers raises nothing more specific
        raise WeightsError(f"{path} is damaged: {error}") from error


def _refuse(fields: Fields) -> None:
    """What every family may ask for and no decoder of ours does."""
    if fields.has("quantization_config"):
        raise ModelError(f"{fields.where}: quantised checkpoints (quantization_config) are not supported")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.wrong("hidden_act", "'silu'")
    if fields.flag("use_sliding_window", default=False):
        raise ModelError(f"{fields.where}: sliding-window attention (use_sliding_window) is not supported")
