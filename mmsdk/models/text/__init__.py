"""Text models: the decoder and the tokenizer of a checkpoint.

    decoder, tokenizer = load_decoder(Path("model.gguf"), torch.bfloat16)

One file per family, named as `config.json` names its `model_type`.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from mmsdk import plugins
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.sight import Sees
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.quant.types import Quantize
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.block_scaled import SCALES, BlockScaled, block_of
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.folder import Folder
from mmsdk.weights.gguf import open_inner
from mmsdk.weights.names import GGUF, HUGGINGFACE, Naming, used
from mmsdk.weights.quantised import gguf_decoder, put_together
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["INNER", "alone", "decoder_of", "folder_decoder", "load_decoder", "nested_decoder", "read_config", "read_decoder"]

PACKAGE = "mmsdk.models.text"

INNER = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text")
"""Language models that are parts of larger ones and never stand alone."""


@runtime_checkable
class Family(Protocol):
    """What a family's module offers. `names` are those of its tensors in the Hugging Face layout."""

    @property
    def names(self) -> Naming:
        """For each tensor of the decoder, the checkpoint's that make it."""
        ...

    def decoder_config(self, fields: Fields) -> DecoderConfig:
        """The decoder's config from the checkpoint's own settings; ModelError for what is not supported."""
        ...


@runtime_checkable
class Built(Protocol):
    """The same of a family whose decoder is built otherwise, and read by the module itself."""

    def decoder_config(self, fields: Fields) -> DecoderConfig:
        """What any decoder is asked about; ModelError for what is not supported."""
        ...

    def decoder_of(self, fields: Fields, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize) -> Decoder:
        """The decoder of settings and tensors. Raises as `mmsdk.models.text.decoder_of` does."""
        ...


def alone() -> list[str]:
    """The families that can be asked by themselves."""
    return [name for name in plugins.available(PACKAGE) if name not in INNER]


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
    family = _family(fields)
    _refuse(fields)
    return family.decoder_config(fields)


def decoder_of(fields: Fields, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "none", sees: Sees = "before") -> Decoder:
    """The decoder of settings and of tensors that are named as a text model alone names them ("model.layers...", "lm_head.weight").

    `sees` is who sees what of a prompt, which is no setting of the decoder's but of what it is part of.
    Raises ModelError for a family or a setting that is not supported, and for tensors, all of them named, that are missing or left over.
    """
    family = _family(fields)
    if not isinstance(family, Family):
        _refuse(fields)
        return family.decoder_of(fields, checkpoint, dtype, quantize)
    config, names = replace(read_config(fields), sees=sees), family.names
    head = f"|{re.escape(HUGGINGFACE.head)}" if config.tied else ""
    scaled = fields.has("quantization_config")
    spare = rf".*\.inv_freq{head}{_ahead(fields, config)}" + (f"|.*{SCALES}" if scaled else "")
    checkpoint.fit(used(names, config), "the decoder of its config", spare)
    return put_together(names, config, BlockScaled(checkpoint, block_of(fields)) if scaled else checkpoint, dtype, quantize)


def folder_decoder(folder: Folder, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder of a folder that holds nothing else, from its GGUF file where it comes with one."""
    for path in folder.gguf:
        return _from_gguf(path, folder.config, dtype, quantize, "before")
    return decoder_of(folder.config, folder.checkpoint, dtype, quantize)


def nested_decoder(
    folder: Folder, checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "none", sees: Sees = "before"
) -> Decoder:
    """The decoder within a larger model, by the `text_config` of its settings; its tensors are named as in `decoder_of`.

    Checkpoints say in several places, and not always truly, whether the head is tied to the embedding: it is where none is stored, unless
    all of them deny it. Where the folder comes with a GGUF file, the tensors are that file's, and those here are not looked at.
    """
    text, stated = folder.config.group("text_config"), "tie_word_embeddings"
    for path in folder.gguf:
        return _from_gguf(path, Fields(text.where, {"model_type": "llama", **text.values}), dtype, quantize, sees)
    told = [one.flag(stated) for one in (text, folder.config) if one.has(stated)]
    tied = HUGGINGFACE.head not in checkpoint.files and (any(told) or not told)
    values = {"model_type": "llama", **text.values, stated: tied}
    if not isinstance(_family(Fields(text.where, values)), Family):
        raise ModelError(f"{text.where}: a {values['model_type']} reads text alone, and takes no pictures")
    return decoder_of(Fields(text.where, values), checkpoint, dtype, quantize, sees)


def _from_gguf(path: Path, fields: Fields, dtype: torch.dtype, quantize: Quantize, sees: Sees) -> Decoder:
    """The decoder of these settings from the tensors of a GGUF file, which must be of the same sizes."""
    told, (held, source) = read_config(fields), open_inner(path)
    for name in ("width", "layers", "heads", "kv_heads", "head_dim", "inner", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        if getattr(held, name) != getattr(told, name):
            raise ModelError(f"{path}: its {name} is {getattr(held, name)}, {fields.where} says {getattr(told, name)}")
    family = _family(fields)
    if not isinstance(family, Family) or family.names is not HUGGINGFACE:
        raise ModelError(f"{path}: a {fields.text('model_type')} has tensors that are not read from GGUF files")
    # rows of the vocabulary may be padded otherwise, and a file that has no head has it tied
    config = replace(told, vocabulary=held.vocabulary, tied=held.tied, sees=sees)
    return put_together(GGUF, config, source, dtype, quantize, source.int4)


def read_decoder(folder: Path, dtype: torch.dtype, quantize: Quantize = "none") -> Decoder:
    """The decoder of a folder. Raises as `load_decoder` does, also for tensors that are left over."""
    return decoder_of(read_fields(folder / "config.json"), open_checkpoint(folder), dtype, quantize)


def _family(fields: Fields) -> Family | Built:
    kind = fields.text("model_type")
    if kind not in plugins.available(PACKAGE):
        raise ModelError(f"{fields.where}: the family {kind!r} is not supported; supported: {', '.join(alone())}")
    family = plugins.find(PACKAGE, kind)
    assert isinstance(family, Family | Built), f"{PACKAGE}.{kind} is either"
    return family


def _ahead(fields: Fields, config: DecoderConfig) -> str:
    """A pattern of the tensors of layers behind the last one, which predict further tokens ahead (DeepSeek-V3's MTP) and are left out."""
    behind = range(config.layers, config.layers + min(fields.whole("num_nextn_predict_layers", 0), config.layers))
    return "".join(rf"|model\.layers\.{layer}\..*" for layer in behind)


def _refuse(fields: Fields) -> None:
    """What every family may ask for and no decoder of ours does."""
    if fields.has("quantization_config"):
        block_of(fields)
    known = ("gelu", "gelu_pytorch_tanh") if fields.text("model_type", "").startswith("gemma") else ("silu", "swish")
    if fields.text("hidden_act", known[0]) not in known:
        raise fields.wrong("hidden_act", repr(known[-1]))
    if fields.flag("use_sliding_window", default=False):
        raise ModelError(f"{fields.where}: sliding-window attention (use_sliding_window) is not supported")
