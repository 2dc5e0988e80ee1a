"""A conversation: questions that know what was asked and answered before, with pictures and clips in any turn.

    chat = pipe.chat("Be brief.")
    chat("photo.jpg", "What is on the table?")
    chat("And beside it?")                          # only what is new goes through the decoder
    for piece in chat.stream("Which is larger?"): print(piece, end="")
    chat.edit(1, "And under it?")                   # asks the second question in other words; what came after it is gone
    chat.undo()

A chat is its turns, and nothing else makes a difference to an answer: it is that of a pipeline which is told the whole conversation, in the
words of the checkpoint's own template. The cache is kept from turn to turn beside them, and looked up by content: what the prompt and what
the cache holds begin with is not read again, token by token (in blocks, where the pipeline's memory is paged and shared with other calls).

A turn counts when its answer is whole. A stream that is left or interrupted, or an answer that fails, leaves the conversation as it was.
So does one that is overtaken by another question or a change, in this thread or another: it ends with an InputError.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import overload

from mmsdk.adapters import Worn
from mmsdk.answer import Answer
from mmsdk.answering import Stream, alone, checked, streamed
from mmsdk.compress import Compression
from mmsdk.doors import door
from mmsdk.encoded import Given
from mmsdk.errors import InputError
from mmsdk.exclusive import Exclusive
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.held import HeldMemory
from mmsdk.kv.held_rounded import HeldRounded
from mmsdk.kv.memory import DenseMemory, RoundedMemory
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text, Turn, written
from mmsdk.recall import SIGHTS, Recall, Sights
from mmsdk.stages import Question, read, refuse_messages
from mmsdk.vision.values import shown, whole

__all__ = ["Chat", "Exchange"]

PLAIN = Worn()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, with what was shown, and its answer."""

    asked: Prompt
    answer: Answer

    def __repr__(self) -> str:
        looked = [medium.source for medium in self.asked.media]
        return f"Exchange({shown(self.question)}, answer={shown(str(self.answer))}{f', shown={shown(looked)}' if looked else ''})"

    def __str__(self) -> str:
        looked = "".join(f"[{medium.source}] " for medium in self.asked.media)
        return f"{looked}{self.question}\n  {self.answer}"

    @property
    def question(self) -> str:
        """The words of the question."""
        return self.asked.text

    @property
    def turns(self) -> tuple[Turn, Turn]:
        """Both sides of it."""
        return Turn("user", self.asked.segments), Turn("assistant", (Text(str(self.answer)),))


class Chat:
    """A conversation with one model. `config` are the settings of its answers, and may be replaced.

    Several threads may hold it, but a conversation has one next turn: of two questions at one time the second is answered behind the first,
    or the first ends with an InputError where it was asked. No turn is lost without a word, and no answer is said from a cache that another
    question has changed.
    """

    def __init__(
        self,
        vlm: VLM,
        compression: Compression,
        recall: Recall,
        system: str | None = "",
        config: GenerationConfig | None = None,
        worn: Worn = PLAIN,
    ) -> None:
        """A conversation in which nothing was said yet. Raises InputError for a system prompt that cannot be read, and other settings."""
        self.config = _settings(config, GenerationConfig())
        self._vlm, self._compression, self._recall, self._worn = vlm, compression, _held(recall), worn
        self._turns: tuple[Exchange, ...] = ()
        # counts what was begun and what was changed: a stream of an earlier state is over
        self._state = 0
        # held for a step of an answer or a change, not from one piece to the next: a reader may take any time between them
        self._alone = Exclusive("chat")
        self._system = _checked(system)

    def __repr__(self) -> str:
        count, system = len(self._turns), f", system={shown(self._system)}" if self._system else ""
        return f"Chat({self._vlm.name!r}, {count} turn{'s' * (count != 1)}{system})"

    @property
    def turns(self) -> tuple[Exchange, ...]:
        """What was asked and answered, in order."""
        return self._turns

    @property
    def system(self) -> str:
        """What the model is told before the conversation; "" for nothing."""
        return self._system

    @system.setter
    def system(self, words: str | None) -> None:
        told = _checked(words)
        with self._alone:
            self._system = told
            self._changed(0)

    @overload
    def __call__(self, question: str, /, *, config: GenerationConfig | None = ...) -> Answer: ...

    @overload
    def __call__(self, media: Given | Sequence[Given], question: str, /, *, config: GenerationConfig | None = ...) -> Answer: ...

    @door
    def __call__(self, media: Given | Sequence[Given], question: str | None = None, /, *, config: GenerationConfig | None = None) -> Answer:
        """Ask the next question, about what was shown before or about further pictures and clips; `config` holds for this answer alone.

        Raises InputError for what cannot be read, and where the conversation is longer than the model holds; ModelError where the template
        will not have it, as some will not have a system prompt. The conversation is then as it was.
        """
        return self._next(media, question, config).answer

    @overload
    def stream(self, question: str, /, *, config: GenerationConfig | None = ...) -> Stream: ...

    @overload
    def stream(self, media: Given | Sequence[Given], question: str, /, *, config: GenerationConfig | None = ...) -> Stream: ...

    @door
    def stream(self, media: Given | Sequence[Given], question: str | None = None, /, *, config: GenerationConfig | None = None) -> Stream:
        """The same in pieces. The turn counts once the stream has been read to its end; one that is left has never been asked.

        Whatever else is asked or changed meanwhile ends the stream with an InputError.
        """
        return self._next(media, question, config)

    @door
    def edit(self, turn: int, question: str, *, config: GenerationConfig | None = None) -> Answer:
        """Ask the question of a turn in other words, about what was shown with it; the turns behind it are gone.

        Turns count from 0, and from the end below it. Raises InputError for one that is not there, and what asking raises.
        """
        return self.stream_edit(turn, question, config=config).answer

    @door
    def stream_edit(self, turn: int, question: str, *, config: GenerationConfig | None = None) -> Stream:
        """The same in pieces: the turns are changed once the stream has been read to its end."""
        with self._alone:
            place = self._place(turn)
            return self._begun(self._turns[:place], Prompt.of(self._turns[place].asked.media, question), config)

    def drop(self, turn: int) -> Exchange:
        """Take a turn out, wherever it is; what was said after it stays as it was said. Raises InputError for one that is not there."""
        with self._alone:
            place = self._place(turn)
            gone = self._turns[place]
            self._turns = self._turns[:place] + self._turns[place + 1 :]
            self._changed(place)
            return gone

    def undo(self) -> Exchange:
        """Take the last turn out. Raises InputError where there is none."""
        return self.drop(-1)

    def _changed(self, turns: int) -> None:
        """Only the first so many turns stand as they stood."""
        self._state += 1
        if isinstance(self._recall.memory, HeldMemory | HeldRounded):
            self._recall.memory.dropped(turns)

    def _place(self, turn: int) -> int:
        count = len(self._turns)
        if not count:
            raise InputError("nothing was asked yet, so that there is no turn to change or to take out", item="turn")
        if not whole(turn, -count) or turn >= count:
            told = "there is one, and it is number 0" if count == 1 else f"there are {count}, numbered from 0 to {count - 1}"
            raise InputError(f"there is no turn {shown(turn)}: {told}; -1 is the last one", item="turn")
        return turn % count

    def _next(self, media: Given | Sequence[Given], question: str | None, config: GenerationConfig | None) -> Stream:
        """The next answer behind all turns."""
        asked = _asked(media, question)
        with self._alone:
            return self._begun(self._turns, asked, config)

    def _begun(self, before: tuple[Exchange, ...], asked: Prompt, config: GenerationConfig | None) -> Stream:
        """The next answer behind these turns."""
        told = [Turn("system", (Text(self._system),))] if self._system else []
        talk = Prompt.talk([*told, *(turn for exchange in before for turn in exchange.turns), Turn("user", asked.segments)])
        settings = _settings(config, self.config)
        checked(self._vlm, settings)
        self._state += 1
        if isinstance(self._recall.memory, HeldMemory | HeldRounded):
            self._recall.memory.behind(len(before))
        try:
            stream = streamed(self._vlm, self._compression, ([], talk), settings, self._recall, self._worn)
        except InputError as error:
            raise _longer(error) if before and error.item == "prompt" else error from None
        return Stream(self._pieces(stream, before, asked, self._state))

    def _pieces(self, stream: Stream, before: tuple[Exchange, ...], asked: Prompt, state: int) -> Generator[str, None, Answer]:
        while True:
            with self._alone:
                # the cache is that of the conversation as it is now
                if state != self._state:
                    raise InputError("the conversation has gone on without it", item="stream")
                piece = next(stream, None)
                if piece is None:
                    return self._counted(stream.answer, before, asked)
            yield piece

    def _counted(self, answer: Answer, before: tuple[Exchange, ...], asked: Prompt) -> Answer:
        """The answer, which is whole, as the last turn."""
        self._turns = (*before, Exchange(asked, answer))
        if isinstance(self._recall.memory, HeldMemory | HeldRounded):
            self._recall.memory.said(answer.ids)
        return answer


def _held(recall: Recall) -> Recall:
    """The memory of one conversation: the pipeline's, where it remembers; else a cache that is kept, where it can be cut back.

    A policy that drops tokens as it goes cannot be: then each turn is read as a whole, and pictures alone are remembered.
    """
    memory = recall.memory
    if memory.page:
        return recall
    if isinstance(memory, RoundedMemory):
        return Recall(HeldRounded(memory), Sights(SIGHTS), recall.tenant)
    return Recall(HeldMemory() if isinstance(memory, DenseMemory) else memory, Sights(SIGHTS), recall.tenant)


def _asked(media: Given | Sequence[Given], question: str | None) -> Prompt:
    """One question, its pictures and clips decoded."""
    asked: Question = (media, "" if question is None else question)
    if question is None:
        refuse_messages(media)
        if not isinstance(media, str):
            raise InputError('the question is missing; write chat("What is it?"), or chat("photo.jpg", "What is it?")', item="question")
        asked = [], media
    (found,) = read([asked]).values()
    if isinstance(found, InputError):
        raise alone(found)
    return found


def _checked(system: str | None) -> str:
    return "" if system is None else written(system, "system", "what the model is told before the conversation")


def _settings(config: GenerationConfig | None, usual: GenerationConfig) -> GenerationConfig:
    """The settings, or the usual ones where there are none. Raises InputError for what are no settings."""
    found = usual if config is None else config
    if not isinstance(found, GenerationConfig):
        raise InputError(f"it is {shown(found)}, expected settings: GenerationConfig(max_tokens=32)", item="config")
    return found


def _longer(error: InputError) -> InputError:
    return InputError(f"{error.message}; or take turns out of the conversation (chat.drop, /drop)", item="conversation")
