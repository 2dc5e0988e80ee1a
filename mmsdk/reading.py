"""Questions as users write them, read: media loaded, words beside them, and everything else refused by name."""

from collections.abc import Iterator, Mapping, Sequence

from mmsdk.encoded import Encoded, Given
from mmsdk.errors import InputError
from mmsdk.prompt import Prompt
from mmsdk.vision.intake import load
from mmsdk.vision.values import shown

__all__ = ["Question", "pairs_of", "read", "refuse_messages", "refuse_pairs"]

# What a user writes for one question: the media (one, several or none) and the words; or no media, and a prompt that holds its own.
Question = tuple[Given | Sequence[Given], str | Prompt]


def read(items: Sequence[Question], first: int = 0) -> dict[int, Prompt | InputError]:
    """Load the media of every question; a row whose media or words cannot be used becomes the error, with its place in the batch."""
    return {index: _read(index, item) for index, item in enumerate(items, first)}


def pairs_of(items: object) -> Sequence[Question]:
    """The batch as it is: what is wrong with one item becomes that item's error where it is read."""
    refuse_messages(items)
    if isinstance(items, Iterator):
        raise InputError("pairs that come one after another are no batch yet; make it a list: pipe(list(...))", item=type(items).__name__)
    if not isinstance(items, list | tuple):
        raise InputError('a question is missing; write pipe("photo.jpg", "What is this?"), or a list of such pairs', item="question")
    if items and not any(isinstance(item, list | tuple) for item in items):
        told = 'pipe(["a.jpg", "b.jpg"], "Which is older?") asks one about them all, pipe([("a.jpg", "What is it?"), ...]) one about each'
        raise InputError(f"a list of media alone has no question; {told}", item="question")
    return items


def refuse_messages(given: object) -> None:
    """Raise InputError for chat messages as other libraries and APIs take them, one or several, and say what is written here."""
    several = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, Mapping) and ("role" in one or "content" in one) for one in several):
        told = 'chat messages are not taken in this form; write pipe("photo.jpg", "What is it?"), or chat = pipe.chat("Be brief.") and'
        told += ' chat("photo.jpg", "What is it?") for each turn; `mmsdk serve` answers messages over HTTP'
        raise InputError(told, item="messages")


def refuse_pairs(given: object) -> None:
    """Raise InputError for a list of questions where one is answered: pairs of media and words."""
    pairs = isinstance(given, list | tuple) and any(
        isinstance(one, list | tuple) and len(one) == 2 and isinstance(one[1], str | Prompt) for one in given
    )
    if pairs:
        told = "a stream answers one question, once: ask for each of a list in turn, or pipe([...]) for all of them at one time"
        raise InputError(told, item="question")


def _read(index: int, item: object) -> Prompt | InputError:
    try:
        refuse_messages(item)
        refuse_messages(item[0] if isinstance(item, list | tuple) and item else None)
    except InputError as error:
        return error.at(index)
    if not (isinstance(item, list | tuple) and len(item) == 2):
        seen = f"{len(item)} values" if isinstance(item, list | tuple) else shown(item)
        return InputError(f"{seen}, expected a pair (media, question)", item=type(item).__name__, index=index)
    media, words = item
    if media is None:
        return InputError("None is no picture; write [] in its place to ask without one", item="media", index=index)
    if isinstance(words, Prompt) and isinstance(media, list | tuple) and not media:
        return words
    # a list or tuple is always several inputs here, never the frames of one clip
    sources = media if isinstance(media, list | tuple) else [media]
    try:
        return Prompt.of([source if isinstance(source, Encoded) else load(source) for source in sources], words)
    except InputError as error:
        return error.at(index)
