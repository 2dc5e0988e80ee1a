"""A checkpoint's folder in the Hugging Face layout, in the present one or that of earlier years.

| what | read from, the first that is there |
| --- | --- |
| settings | `config.json` |
| tensors | `model.safetensors`, or shards and their index; those of the language model a GGUF file, where one is asked for |
| words | `tokenizer.json`, and names of special tokens in `tokenizer_config.json` |
| pictures | `image_processor` of `processor_config.json`, `preprocessor_config.json` |
| clips | `video_processor` of `processor_config.json`, `video_preprocessor_config.json`, as pictures |
| chat template | `chat_template.jinja`, `chat_template.json`, `processor_config.json`, `tokenizer_config.json` |
| ends of an answer | `eos_token_id` of `generation_config.json`, of `config.json`, of its `text_config` |

Nothing of it is run but the template, in a sandbox (`mmsdk.template`); `auto_map` and other references to code are not looked at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer as Backend

from mmsdk.errors import ModelError, WeightsError
from mmsdk.template import Template
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.values import cause
from mmsdk.weights.fields import Fields, read_fields
from mmsdk.weights.safetensors import Checkpoint, open_checkpoint

__all__ = ["Folder"]

_PROCESSOR, _WORDS = "processor_config.json", "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Folder:
    """The settings and tensors of one checkpoint; everything else is read when it is asked for."""

    path: Path
    config: Fields
    checkpoint: Checkpoint
    gguf: tuple[Path, ...] = ()

    @staticmethod
    def of(path: Path, gguf_file: str = "") -> "Folder":
        """Open it, with a GGUF file, in the folder or anywhere, for the tensors of the language model.

        Raises WeightsError for files that are missing or damaged, ModelError for settings that are none.
        """
        found = [one for one in (path / gguf_file, Path(gguf_file).expanduser()) if one.is_file()] if gguf_file else []
        if gguf_file and not found:
            there = ", ".join(sorted(one.name for one in path.glob("*.gguf"))) or "none"
            raise WeightsError(f"there is no GGUF file {gguf_file!r}, neither here nor in {path}; there is {there}")
        # beside it there may be no other tensors
        bare = found and not any(path.glob("*.safetensors"))
        return Folder(path, read_fields(path / "config.json"), Checkpoint(path, {}) if bare else open_checkpoint(path), tuple(found[:1]))

    def telling(self, told: Callable[[int], None]) -> "Folder":
        """The same; it tells how many bytes of tensors have been read so far, as they are."""
        count = 0

        def read(size: int) -> None:
            nonlocal count
            count += size
            told(count)

        return replace(self, checkpoint=replace(self.checkpoint, advance=read))

    def with_text(self, kind: str) -> "Folder":
        """The same, where the settings of the language model say nothing of its family, with this one."""
        text = {"model_type": kind, **self.config.group("text_config").values}
        return replace(self, config=Fields(self.config.where, {**self.config.values, "text_config": text}))

    @property
    def processor(self) -> Fields:
        """Settings of what joins pictures and words."""
        return self._settings(_PROCESSOR)

    @property
    def pictures(self) -> Fields:
        """Settings by which pictures are prepared."""
        nested = self.processor.group("image_processor")
        return nested if nested.values else self._settings("preprocessor_config.json")

    @property
    def clips(self) -> Fields:
        """Settings by which the frames of clips are prepared; those of pictures where there are none."""
        nested = self.processor.group("video_processor")
        own = nested if nested.values else self._settings("video_preprocessor_config.json")
        return own if own.values else self.pictures

    @property
    def names(self) -> dict[str, str]:
        """Special tokens by what a template calls them: `bos_token`, `eos_token`, ..."""
        settings = {**self._settings("special_tokens_map.json").values, **self._settings(_WORDS).values}
        named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        return {key: value for key, value in named.items() if value}

    def token(self, name: str, default: str) -> str:
        """A special token by its name in the settings of the tokenizer or of the processor."""
        return self.names.get(name) or _content(self.processor.values.get(name)) or default

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer. Raises ModelError where the checkpoint names none."""
        for settings in (self._settings("generation_config.json"), self.config, self.config.group("text_config")):
            if settings.has("eos_token_id"):
                return frozenset(settings.wholes("eos_token_id"))
        raise ModelError(f"{self.path} does not say which token ends an answer (eos_token_id in generation_config.json)")

    def template(self, rows: int, image: str = "", video: str = "") -> Template:
        """The checkpoint's words, for an embedding of so many rows; `image` and `video` are special tokens, see `Template`.

        Raises ModelError where there is no chat template, or the tokenizer does not know these tokens.
        """
        if not self.talk:
            raise ModelError(f"{self.path} has no chat template (chat_template.jinja), so it is not known how to ask it anything")
        tokenizer = self.tokenizer([token for token in (image, video) if token])
        tokenizer.fit(rows, f"{self.path}: the embedding")
        return Template(str(self.path), self.talk, tokenizer, self.names, image, video)

    @property
    def talk(self) -> str:
        """The source of the chat template; "" where the checkpoint has none."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise WeightsError(f"{path} cannot be read: {cause(error)}") from error
        settings = [self._settings("chat_template.json"), self.processor, self._settings(_WORDS)]
        found = [_default(one.values.get("chat_template")) for one in settings]
        return next((source for source in found if source), "")

    def tokenizer(self, markers: Sequence[str] = ()) -> TextTokenizer:
        """The tokenizer; `markers` are contents that a text must never turn into one token. Raises WeightsError where there is none."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"{self.path} has no tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing more specific
            raise WeightsError(f"{path} is damaged: {error}") from error
        return TextTokenizer(backend, markers)

    def _settings(self, name: str) -> Fields:
        """A file of settings, none where it is not there."""
        path = self.path / name
        return read_fields(path) if path.is_file() else Fields(str(path), {})


def _content(token: object) -> str:
    """A special token as it is written: a text, or a group that holds it."""
    if isinstance(token, Mapping):
        token = cast(Mapping[str, object], token).get("content")
    return token if isinstance(token, str) else ""


def _default(templates: object) -> str:
    """One template, or of several that have names the one for conversations."""
    if isinstance(templates, list):
        named = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
        templates = named.get("default")
    elif isinstance(templates, dict):
        templates = templates.get("default")
    return templates if isinstance(templates, str) else ""
