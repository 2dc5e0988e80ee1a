"""What is asked: text, images and clips in the user's order, and what they become in front of the decoder.

A `Prompt` holds what the user gave. A model family turns it into a `Layout`: runs of token ids and slots for visual inputs. Every
count and every position in the SDK is read from the layout, so that nothing has to agree with anything else by accident. Text never
becomes a slot: a placeholder or a special token that a user types is text, and is tokenised as ordinary characters.

Letters: s tokens of the whole prompt, n visual tokens of one input, d width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.encoded import Encoded
from mmsdk.errors import InputError, ModelError
from mmsdk.vision.types import Image, Media, Video

__all__ = ["Ids", "Layout", "Prompt", "Segment", "Slot", "Span", "Text"]


@dataclass(frozen=True, slots=True)
class Text:
    """Words of the user, to be read as they stand."""

    content: str


Segment = Text | Image | Video | Encoded


@dataclass(frozen=True, slots=True)
class Prompt:
    """Segments in the user's order; media are counted from 0 in that order, whatever their size or kind."""

    segments: tuple[Segment, ...]

    @staticmethod
    def of(media: Sequence[Media | Encoded], question: str) -> "Prompt":
        """What is looked at, then what is asked. Raises InputError for a question that is no string, empty or no Unicode."""
        if not isinstance(question, str):
            raise InputError(f"it is {type(question).__name__}, expected a string; write what you want to know in quotes", item="question")
        if not question.strip():
            raise InputError("the question is empty; write what you want to know", item="question")
        try:
            question.encode()
        except UnicodeEncodeError as error:
            # bytes of another encoding, as a terminal or a file name hands them over
            raise InputError(f"holds {question[error.start]!r}, which is no letter; decode it as UTF-8", item="question") from None
        return Prompt((*media, Text(question)))

    @property
    def media(self) -> tuple[Media | Encoded, ...]:
        """The images and clips, in order, also those that were encoded before."""
        return tuple(segment for segment in self.segments if not isinstance(segment, Text))

    @property
    def text(self) -> str:
        """All words, in order, one segment a line."""
        return "\n".join(segment.content for segment in self.segments if isinstance(segment, Text))


@dataclass(frozen=True, slots=True)
class Ids:
    """A run of token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a visual input, by its number in the prompt."""

    media: int


Span = Ids | Slot


@dataclass(frozen=True, slots=True)
class Layout:
    """The prompt as the decoder sees it. `media` is how many visual inputs the prompt has; each has exactly one slot.

    Raises ModelError where a family's layout forgets, doubles or invents a slot.
    """

    spans: tuple[Span, ...]
    media: int

    def __post_init__(self) -> None:
        slots = [span.media for span in self.spans if isinstance(span, Slot)]
        if sorted(slots) != list(range(self.media)):
            raise ModelError(f"the layout has slots for visual inputs {slots}, but the prompt has {self.media} of them, counted from 0")

    @property
    def fixed(self) -> int:
        """Tokens that are there whatever the budget: words and separators."""
        return sum(len(span.ids) for span in self.spans if isinstance(span, Ids))

    def lengths(self, counts: Sequence[int]) -> list[int]:
        """Tokens of each span, given the visual tokens of each input."""
        if len(counts) != self.media:
            raise ModelError(f"the layout has {self.media} visual inputs, {len(counts)} came with tokens")
        return [len(span.ids) if isinstance(span, Ids) else counts[span.media] for span in self.spans]

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
        runs = [words[:length] if isinstance(span, Ids) else places[span.media] for span, length in zip(self.spans, lengths, strict=True)]
        return torch.cat([start + run for start, run in zip(accumulate(lengths, initial=0), runs, strict=False)])

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
        return torch.cat([next(words) if isinstance(span, Ids) else visual[span.media] for span in self.spans])
