"""A turn that is broken off, taken back or asked in other words leaves nothing behind, in every kind of memory, however long it was."""

import pytest

from mmsdk.chat import Chat
from mmsdk.compress import compression
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.kv.memory import KINDS
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import recalling

POLICIES = ("h2o:64", "snapkv:0.5", "tova:64", "streaming:64", "quest:64")
SHORT = GenerationConfig(max_tokens=12, logprobs=1)
FIRST = "Tell me what you see in there and where it is. " * 9
SECOND = "And which of these things is larger than another one? " * 4
LONG = "What lies behind all of that, and why is it there? " * 12


def begun(small: Mini, kv: str) -> Chat:
    """A chat of one turn, whose tokens are only just within what is kept exactly, or beyond."""
    chat = Pipeline(small, compression("identity"), recall=recalling(kv)).chat(config=SHORT)
    chat(FIRST)
    return chat


def state(chat: Chat) -> list[tuple[list[int], list[float], int]]:
    """Ids, how likely each was, and how much was known: equal only where the cache is."""
    return [([*turn.answer.ids], [one.logprob for one in turn.answer.logprobs], turn.answer.tokens.recalled) for turn in chat.turns]


def same(chat: Chat, other: Chat, kv: str) -> None:
    """Both are asked the same, and answer the same."""
    exact = kv in ("dense", "paged")
    for words in (SECOND, "Sure?"):
        chat(words)
        other(words)
    for (ids, likely, known), (wanted, probable, recalled) in zip(state(chat), state(other), strict=True):
        assert ids == wanted and likely == pytest.approx(probable, abs=1e-4)
        # an exact memory is written over, and read anew where what was broken off began otherwise
        assert exact or known == recalled


def interrupted(chat: Chat, small: Mini, after: int) -> None:
    """Ask what is long, and press Ctrl-C in the middle of the layers."""
    left = [after]

    def interrupt(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    hook = small.decoder.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            chat(LONG)
    finally:
        hook.remove()


@pytest.mark.parametrize("kv", [*KINDS, *POLICIES])
def test_a_chat_that_was_interrupted_answers_as_one_that_never_was(small: Mini, kv: str) -> None:
    """While a prompt is read, while an answer is said, and by who leaves a stream or asks something else meanwhile.

    What was broken off is so long that it takes what was said before it out of the window which is kept exactly.
    """
    never, chat = begun(small, kv), begun(small, kv)
    interrupted(chat, small, 0)
    interrupted(chat, small, 3)
    closed = chat.stream(LONG)
    next(closed)
    closed.close()
    overtaken = chat.stream_edit(0, LONG)
    next(overtaken)
    same(chat, never, kv)
    with pytest.raises(InputError, match="the conversation has gone on without it"):
        next(overtaken)
    assert len(chat.turns) == 3


@pytest.mark.parametrize("kv", [*KINDS, POLICIES[0]])
def test_turns_that_are_taken_back_or_asked_in_other_words_leave_nothing_behind(small: Mini, kv: str) -> None:
    never, undone, edited = begun(small, kv), begun(small, kv), begun(small, kv)
    undone(LONG)
    undone("Why?")
    undone.drop(1)
    undone.undo()
    same(undone, never, kv)

    edited(LONG)
    edited("Why?")
    edited.edit(1, SECOND)
    edited("Sure?")
    assert [ids for ids, _, _ in state(edited)] == [ids for ids, _, _ in state(never)]
    for (_, likely, _), (_, probable, _) in zip(state(edited), state(never), strict=True):
        assert likely == pytest.approx(probable, abs=1e-4)
