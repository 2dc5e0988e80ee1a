"""A conversation in the words of a checkpoint: its own chat template, in which what users write stays text.

    template = Template(where, source, tokenizer, names, image="<image>")
    layout = template.layout([Turn("user", prompt.segments)], lambda media: [Slot(media)])

The template is Jinja, rendered in jinja2's sandbox, which gives it no way to Python. It is told the turns, and writes special tokens as
text. So that no user can write one, each character of a user's text that a special token could begin with is followed by a guard, a
character that no text of the conversation holds; only special tokens without a guard in or behind them are placed, by their ids, and the
guards are taken out again before the rest is tokenised, as the ordinary characters that it is made of.

Where the template writes its token for a picture or a clip, the family says what stands there: slots, learned vectors, or further text.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmsdk.encoded import Encoded, frames_of
from mmsdk.errors import ModelError
from mmsdk.prompt import Ids, Layout, Learned, Slot, Span, Text, Turn
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.types import Media

__all__ = ["Piece", "Template", "Turn"]

Piece = str | Slot | Learned
"""What stands in the place of a picture or a clip. Text of a family may hold special tokens."""

# What a template that asks for something unforeseen may fail with, inside the sandbox.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class _Token:
    """A special token that the template, or a family, has written."""

    content: str
    id: int


@dataclass(frozen=True, slots=True)
class Template:
    """`source` is Jinja, `where` names the checkpoint in messages, and `names` are special tokens as the template calls them.

    `image` and `video` are the special tokens that it writes where a picture or a clip stands, "" for none; one that knows no clips is
    told of pictures. `plain` says that it knows texts only, and takes them as such. `around` says that the ids which the vocabulary puts
    around a text are added, unless the template has written the first of them itself. `with_clips` takes the place of a source that knows
    no clips wherever there are any.
    """

    where: str
    source: str
    tokenizer: TextTokenizer
    names: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    video: str = ""
    plain: bool = False
    around: bool = True
    with_clips: str = ""

    def layout(self, turns: Sequence[Turn], expanded: Callable[[int], Sequence[Piece]]) -> Layout:
        """The conversation up to where an answer begins; `expanded` says what stands for a visual input, by its number.

        Raises ModelError where the template fails, or has a place for more or fewer pictures and clips than there are.
        """
        guard = _guard(turns)
        rendered = self.rendered(turns, guard)
        media = [segment for turn in turns for segment in turn.segments if not isinstance(segment, Text)]
        moving = [self._moves(item) for item in media]
        pictures, clips = (iter([number for number, clip in enumerate(moving) if clip == kind]) for kind in (False, True))
        waiting = {self.image: pictures, self.video: clips}
        pieces: list[str | _Token | Slot | Learned] = []
        for part in self._parts(rendered, guard):
            if isinstance(part, _Token) and part.content in waiting:
                number = next(waiting[part.content], None)
                if number is None:
                    raise ModelError(f"{self.where}: the chat template has more {part.content!r} than there are pictures or clips")
                pieces += expanded(number)
            else:
                pieces.append(part)
        if left := [*pictures, *clips]:
            raise ModelError(f"{self.where}: the chat template has no place for the visual inputs {left}, counted from 0")
        begun = rendered.startswith(self.names["bos_token"]) if self.names.get("bos_token") else False
        return Layout(self._spans(pieces, guard, self.around and not begun), len(media))

    def rendered(self, turns: Sequence[Turn], guard: str = "") -> str:
        """The text that the template makes of turns, with guards in what was said. Raises ModelError where it fails."""
        said = [{"role": turn.role, "content": self._content(turn, guard)} for turn in turns]
        moving = any(self._moves(segment) for turn in turns for segment in turn.segments if not isinstance(segment, Text))
        try:
            source = _compiled(self.with_clips if self.with_clips and moving else self.source)
            return source.render(messages=said, tools=None, documents=None, add_generation_prompt=True, **self.names)
        except _FAILURES as error:
            raise ModelError(f"{self.where}: the chat template cannot be used: {type(error).__name__}: {error}") from error

    def _content(self, turn: Turn, guard: str) -> str | list[dict[str, str]]:
        texts = [self._guarded(segment.content, guard) if isinstance(segment, Text) else "" for segment in turn.segments]
        if self.plain:
            return "\n".join(text for text in texts if text)
        return [
            {"type": "text", "text": text} if isinstance(segment, Text) else {"type": "video" if self._moves(segment) else "image"}
            for segment, text in zip(turn.segments, texts, strict=True)
        ]

    def _moves(self, item: Media | Encoded) -> bool:
        """Whether the template is told of a clip."""
        return bool(self.video) and frames_of(item) > 0

    def _guarded(self, text: str, guard: str) -> str:
        """The text with a guard behind its first letter and behind each that a special token could begin with."""
        starts = {content[0] for content in self.tokenizer.specials}
        first = len(text) - len(text.lstrip())
        return "".join(letter + guard if place == first or letter in starts else letter for place, letter in enumerate(text))

    def _parts(self, text: str, guard: str) -> Iterator[str | _Token]:
        """The text cut at the special tokens in it, which take white space with them where their vocabulary says so."""
        contents = sorted(self.tokenizer.specials, key=len, reverse=True)
        if not contents:
            yield text
            return
        pattern = f"({'|'.join(map(re.escape, contents))})" + (f"(?!{re.escape(guard)})" if guard else "")
        words, taken = "", False
        for place, part in enumerate(re.split(pattern, text)):
            if place % 2 == 0:
                words = part.lstrip() if taken else part
                continue
            special = self.tokenizer.specials[part]
            if words := words.rstrip() if special.left else words:
                yield words
            yield _Token(part, special.id)
            words, taken = "", special.right
        if words:
            yield words

    def _spans(self, pieces: Sequence[str | _Token | Slot | Learned], guard: str, around: bool) -> tuple[Span, ...]:
        """Ids of all that is text, slots and vectors as they are. Text is tokenised in one go between two that are no text."""
        cut = [part for piece in _joined(pieces) for part in (self._parts(piece, guard) if isinstance(piece, str) else [piece])]
        spans: list[Span] = [Ids(self.tokenizer.opening)] if around else []
        for place, part in enumerate(cut):
            if isinstance(part, str):
                spans.append(Ids(tuple(self.tokenizer.encode(part.replace(guard, "") if guard else part, begins=place == 0))))
            else:
                spans.append(Ids((part.id,)) if isinstance(part, _Token) else part)
        return _runs([*spans, Ids(self.tokenizer.closing)] if around else spans)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, which marks for training what the model itself says: read as what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 looks for a set of this name

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What is between the two."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """What templates are written for: blocks without their line ends, loop controls, a few functions."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = _as_json
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _now
    return sandbox.from_string(source)


def _as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _guard(turns: Sequence[Turn]) -> str:
    """A character, of those that nobody means anything by, that nobody wrote."""
    said = {letter for turn in turns for segment in turn.segments if isinstance(segment, Text) for letter in segment.content}
    return next(letter for letter in map(chr, itertools.count(0xF0000)) if letter not in said)


def _joined(pieces: Sequence[str | _Token | Slot | Learned]) -> list[str | _Token | Slot | Learned]:
    """The pieces with texts that follow one another as one."""
    joined: list[str | _Token | Slot | Learned] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def _runs(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans with ids that follow one another as one run."""
    runs: list[Span] = []
    for span in spans:
        if isinstance(span, Ids) and runs and isinstance(runs[-1], Ids):
            runs[-1] = Ids(runs[-1].ids + span.ids)
        elif not isinstance(span, Ids) or span.ids:
            runs.append(span)
    return tuple(runs)
