"""What is asked: text, images and clips in the user's order, and what they become in front of the decoder.

A `Prompt` holds what the user gave. A model family turns it into a `Layout`: runs of token ids and slots for visual inputs. Every
count and every position in the SDK is read from the layout, so that nothing has to agree with anything else by accident. Text never
becomes a slot: a placeholder or a special token that a user types is text, and is tokenised as ordinary characters.

Where a family writes something between the parts of one input (the tiles of a picture, its rows, the frames of a clip), the input has
several slots, each for a stretch of its grid; `resolved` tells how many of the tokens that compression left stand in each.

Letters: s tokens of the whole prompt, n visual tokens of one input, d width.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.axes import LINE, Axes, Line, Standing, Turns, turned
from mmsdk.encoded import Encoded
from mmsdk.errors import InputError, ModelError
from mmsdk.vision.types import Image, Media, Video, VisualTokens
from mmsdk.vision.values import brief

__all__ = ["LAST", "Ids", "Layout", "Learned", "Prompt", "Role", "Segment", "Slot", "Span", "Text", "Turn", "written"]

LAST = sys.maxsize
"""Where an input ends, however many cells it has."""


@dataclass(frozen=True, slots=True)
class Text:
    """Words of the user, to be read as they stand."""

    content: str


Segment = Text | Image | Video | Encoded

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says: text and media in its order."""

    role: Role
    segments: tuple[Segment, ...]

    def __repr__(self) -> str:
        return brief(self)

    @property
    def text(self) -> str:
        """All its words, in order, one segment a line."""
        return "\n".join(segment.content for segment in self.segments if isinstance(segment, Text))


@dataclass(frozen=True, slots=True)
class Prompt:
    """Segments in the user's order; media are counted from 0 in that order, whatever their size or kind.

    `begins` says at which segments the turns of a conversation begin, and whose they are: by default all is one turn of the user's.
    """

    segments: tuple[Segment, ...]
    begins: tuple[tuple[int, Role], ...] = ((0, "user"),)

    def __repr__(self) -> str:
        return brief(self)

    @staticmethod
    def of(media: Sequence[Media | Encoded], question: str) -> "Prompt":
        """What is looked at, then what is asked. Raises InputError for a question that is no string, empty or no Unicode."""
        if isinstance(question, str) and not question.strip():
            raise InputError("the question is empty; write what you want to know", item="question")
        return Prompt((*media, Text(written(question, "question", "what you want to know"))))

    @staticmethod
    def talk(turns: Sequence[Turn]) -> "Prompt":
        """A conversation, up to where the next answer begins; media are counted over all of it."""
        starts = accumulate((len(turn.segments) for turn in turns), initial=0)
        segments = tuple(segment for turn in turns for segment in turn.segments)
        return Prompt(segments, tuple(zip(starts, (turn.role for turn in turns), strict=False)))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What each side says, in order."""
        ends = [*(start for start, _ in self.begins[1:]), len(self.segments)]
        return tuple(Turn(role, self.segments[start:end]) for (start, role), end in zip(self.begins, ends, strict=True))

    @property
    def media(self) -> tuple[Media | Encoded, ...]:
        """The images and clips, in order, also those that were encoded before."""
        return tuple(segment for segment in self.segments if not isinstance(segment, Text))

    @property
    def text(self) -> str:
        """All words, in order, one segment a line."""
        return "\n".join(segment.content for segment in self.segments if isinstance(segment, Text))


def written(words: object, item: str, wanted: str) -> str:
    """Words that can be read. Raises InputError, which says to write what is `wanted`, for what is no string or no Unicode."""
    if not isinstance(words, str):
        raise InputError(f"it is {type(words).__name__}, expected a string; write {wanted} in quotes", item=item)
    try:
        words.encode()
    except UnicodeEncodeError as error:
        # bytes of another encoding, as a terminal or a file name hands them over
        raise InputError(f"holds {words[error.start]!r}, which is no letter; decode it as UTF-8", item=item) from None
    return words


@dataclass(frozen=True, slots=True)
class Ids:
    """A run of token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a visual input, by its number in the prompt; or of a part of it, the cells of its grid from `start` up to `stop`.

    Cells are counted in reading order: time, then rows, then columns. In a resolved layout it is the tokens that are counted.
    """

    media: int
    start: int = 0
    stop: int = LAST


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """A run of vectors that a model has learned for what stands between the parts of an input, such as the end of a row."""

    vectors: Float[Tensor, "n d"]

    def __repr__(self) -> str:
        return brief(self)


Span = Ids | Slot | Learned


@dataclass(frozen=True, slots=True)
class Layout:
    """The prompt as the decoder sees it. `media` is how many visual inputs the prompt has; the slots of each cover it, in order.

    `axes` says along what the decoder's heads turn. Raises ModelError where a family's layout forgets, doubles or invents a slot.
    """

    spans: tuple[Span, ...]
    media: int
    axes: Axes = LINE

    def __post_init__(self) -> None:
        ends: dict[int, int] = {}
        for slot in self._slots:
            if slot.start != ends.get(slot.media, 0) or slot.stop < slot.start:
                raise ModelError(f"the layout has slots for visual input {slot.media} that do not follow one another: {slot}")
            ends[slot.media] = slot.stop
        if sorted(ends) != list(range(self.media)) or any(end != LAST for end in ends.values()):
            raise ModelError(f"the layout has slots for visual inputs {ends}, but the prompt has {self.media} of them, counted from 0")

    @property
    def fixed(self) -> int:
        """Tokens that are there whatever the budget: words and separators."""
        return sum(_size(span) for span in self.spans if not isinstance(span, Slot))

    def resolved(self, cells: Sequence[Int[Tensor, " _"]]) -> "Layout":
        """The same where slots count tokens: of each input those in `cells` (ascending) are there. What has no parts stays as it is."""
        parts = {slot.media for slot in self._slots if slot.stop != LAST}
        if not parts:
            return self
        ends = {media: iter(self._ends(media, cells[media])) for media in parts}
        starts = dict.fromkeys(parts, 0)
        spans = list[Span]()
        for span in self.spans:
            if isinstance(span, Slot) and span.media in parts:
                span = replace(span, start=starts[span.media], stop=next(ends[span.media]))
                starts[span.media] = span.stop
            spans.append(span)
        return replace(self, spans=tuple(spans))

    def lengths(self, counts: Sequence[int]) -> list[int]:
        """Tokens of each span, given the visual tokens of each input."""
        if len(counts) != self.media:
            raise ModelError(f"the layout has {self.media} visual inputs, {len(counts)} came with tokens")
        return [min(span.stop, counts[span.media]) - span.start if isinstance(span, Slot) else _size(span) for span in self.spans]

    def length(self, counts: Sequence[int]) -> int:
        """Tokens of the whole prompt."""
        return sum(self.lengths(counts))

    def positions(self, counts: Sequence[int], places: Sequence[Int[Tensor, " _"]] = ()) -> Int[Tensor, " s"]:
        """Positions 0, 1, 2, ... over so many tokens of each input: compact where these are what is really there, so that none is skipped.

        Where only some of them are, at `places` of each input, ascending, these and all words keep the positions that they would have if
        all were there.
        """
        lengths = self.lengths(counts)
        if not places:
            return torch.arange(sum(lengths))
        words = torch.arange(max(lengths, default=0), device=places[0].device)
        runs = [
            _within(places[span.media], span) if isinstance(span, Slot) else words[:length]
            for span, length in zip(self.spans, lengths, strict=True)
        ]
        return torch.cat([start + run for start, run in zip(accumulate(lengths, initial=0), runs, strict=False)])

    def turns(
        self, cells: Sequence[Int[Tensor, " _"]], tokens: Sequence[VisualTokens], places: Sequence[Int[Tensor, " _"]], device: torch.device
    ) -> tuple[Turns, ...]:
        """Where everything stands on several axes; nothing where there is one.

        `cells` are those of the tokens that count of each input, which the slots count too, `tokens` and `places` those of them that are
        there. Steps with words between them have their time in the words.
        """
        if isinstance(self.axes, Line):
            return ()
        standing = [self.axes.cells(*one) for one in zip(cells, tokens, strict=True)]
        runs = []
        for span, length in zip(self.spans, self.lengths([len(at) for at in cells]), strict=True):
            if isinstance(span, Slot):
                here = standing[span.media][span.start : span.stop]
                here = here if _all(span) else torch.cat((torch.zeros_like(here[:, :1]), here[:, 1:]), dim=1)
                runs.append(Standing(length, (here,), (_within(places[span.media], span),)))
            else:
                runs.append(Standing(length))
        return (turned(runs, device),)

    def visual(self, counts: Sequence[int]) -> Bool[Tensor, " s"]:
        """True where a visual token stands."""
        kinds = torch.tensor([isinstance(span, Slot) for span in self.spans], dtype=torch.bool)
        return kinds.repeat_interleave(torch.tensor(self.lengths(counts), dtype=torch.int64))

    def embed(
        self, visual: Sequence[Float[Tensor, "_ d"]], embed: Callable[[Int[Tensor, "1 s"]], Float[Tensor, "1 s d"]], device: torch.device
    ) -> Float[Tensor, "s d"]:
        """The prompt's embeddings: words through `embed` (in one call), sight as it comes from the connector."""
        self.lengths([len(tokens) for tokens in visual])
        runs = [span.ids for span in self.spans if isinstance(span, Ids)]
        ids = torch.tensor([[i for run in runs for i in run]], dtype=torch.int64, device=device)
        words = iter(embed(ids)[0].split([len(run) for run in runs]))
        return torch.cat([_vectors(span, visual) if not isinstance(span, Ids) else next(words) for span in self.spans])

    @property
    def _slots(self) -> list[Slot]:
        return [span for span in self.spans if isinstance(span, Slot)]

    def _ends(self, media: int, cells: Int[Tensor, " _"]) -> list[int]:
        """How many of these cells lie before the end of each slot of an input; before the last one's, all."""
        stops = torch.tensor([slot.stop for slot in self._slots if slot.media == media][:-1], dtype=cells.dtype, device=cells.device)
        return [*torch.searchsorted(cells, stops).tolist(), LAST]


def _size(span: Ids | Learned) -> int:
    return len(span.ids) if isinstance(span, Ids) else len(span.vectors)


def _vectors(span: Slot | Learned, visual: Sequence[Float[Tensor, "_ d"]]) -> Float[Tensor, "_ d"]:
    return span.vectors if isinstance(span, Learned) else visual[span.media][span.start : span.stop]


def _within(places: Int[Tensor, " _"], slot: Slot) -> Int[Tensor, " _"]:
    """The places that lie in a slot, counted from its start."""
    if _all(slot):
        return places
    start, stop = torch.searchsorted(places, torch.tensor([slot.start, slot.stop], device=places.device)).tolist()
    return places[start:stop] - slot.start


def _all(slot: Slot) -> bool:
    return slot.start == 0 and slot.stop == LAST
