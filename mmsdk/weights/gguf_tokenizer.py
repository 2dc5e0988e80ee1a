"""A byte-level BPE tokenizer from the metadata of a GGUF file, built directly.

How a text is cut before merging is not in the file; `tokenizer.ggml.pre` names it, and llama.cpp knows each name's rule. An unknown name
is an error: cutting by another rule would give ids that the model never saw.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from mmsdk.errors import ModelError
from mmsdk.tokenizer import TextTokenizer
from mmsdk.weights.gguf_file import Value

__all__ = ["tokenizer_of"]

_CONTROL, _USER = 3, 4
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The rule of GPT-2 is ByteLevel's own; SmolLM cuts out single digits first.
_CUTS: Mapping[str, tuple[PreTokenizer, ...]] = MappingProxyType(
    {
        "default": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
        "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
        "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
        **{
            name: (pre_tokenizers.Split(Regex(rule), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            for name, rule in {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}.items()
        },
    }
)


def tokenizer_of(metadata: Mapping[str, Value]) -> TextTokenizer:
    """The tokenizer that the metadata describes; tokens marked as control become special ones.

    Raises ModelError where it is not byte-level BPE, cuts by an unknown rule, or its tables do not fit together.
    """
    model, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) can be read")
    if not isinstance(cut, str) or cut not in _CUTS:
        raise ModelError(f"tokenizer.ggml.pre is {cut!r}; known are {', '.join(sorted(_CUTS))}")
    tokens, merges = _texts(metadata, "tokens"), _texts(metadata, "merges")
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens has the same token twice")
    backend = _backend(vocabulary, merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(_CUTS[cut]))
    backend.decoder = decoders.ByteLevel()
    _add(backend, tokens, metadata.get("tokenizer.ggml.token_type", np.empty(0, np.int32)))
    return TextTokenizer(backend)


def _texts(metadata: Mapping[str, Value], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list):
        raise ModelError(f"tokenizer.ggml.{name} is missing or no list of texts")
    return found


def _backend(vocabulary: dict[str, int], merges: list[str]) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    strange = next((pair for pair in pairs if pair[0] + pair[1] not in vocabulary or not {*pair} <= vocabulary.keys()), None)
    if strange is not None:
        raise ModelError(f"tokenizer.ggml.merges joins {strange[0]!r} and {strange[1]!r}, which the vocabulary does not hold")
    return Tokenizer(models.BPE(vocabulary, pairs))


def _add(backend: Tokenizer, tokens: list[str], kinds: Value) -> None:
    if not isinstance(kinds, np.ndarray) or len(kinds) not in (0, len(tokens)):
        raise ModelError(f"tokenizer.ggml.token_type does not have an entry for each of the {len(tokens)} tokens")
    control, user = ([tokens[i] for i in np.flatnonzero(kinds == kind)] for kind in (_CONTROL, _USER))
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in user])
