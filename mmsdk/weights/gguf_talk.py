"""How the model of a GGUF file is talked to, by the file's own metadata: its chat template, special tokens by name, what ends an answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmsdk.errors import ModelError
from mmsdk.weights.gguf_file import Value, read_file

__all__ = ["GGUFTalk", "talk_in"]

_ENDS = ("eos", "eot", "eom")
_BEGINNING = "{{ bos_token }}{{ messages[-1]['content'] }}"


@dataclass(frozen=True, slots=True)
class GGUFTalk:
    """`template` is Jinja, "" where a text is gone on with as it is; `names` are special tokens as it calls them ("bos_token")."""

    template: str
    names: Mapping[str, str]
    stop_ids: frozenset[int]


def talk_in(path: Path) -> GGUFTalk:
    """What the file says. Raises WeightsError for one that is damaged, ModelError where it names no token that ends an answer.

    A base model, which has no template, is given its first token where the file asks for that (`add_bos_token`).
    """
    told = read_file(path).metadata
    tokens = told.get("tokenizer.ggml.tokens")
    ids = {kind: _place(told, f"{kind}_token_id") for kind in ("bos", "unknown", "padding", *_ENDS)}
    known = {kind: number for kind, number in ids.items() if isinstance(tokens, list) and 0 <= number < len(tokens)}
    stops = frozenset(known[kind] for kind in _ENDS if kind in known)
    if not stops:
        raise ModelError(f"{path} does not say which token ends an answer (tokenizer.ggml.eos_token_id)")
    assert isinstance(tokens, list), "some token has a place in it"
    names = {f"{_CALLED.get(kind, kind)}_token": tokens[number] for kind, number in known.items()}
    template = told.get("tokenizer.chat_template", "")
    if not isinstance(template, str) or not template:
        template = _BEGINNING if told.get("tokenizer.ggml.add_bos_token") is True and "bos" in known else ""
    return GGUFTalk(template, names, stops)


_CALLED = {"unknown": "unk", "padding": "pad"}


def _place(told: Mapping[str, Value], name: str) -> int:
    found = told.get(f"tokenizer.ggml.{name}")
    return found if isinstance(found, int) else -1
