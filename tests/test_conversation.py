"""Conversations as prompts: turns that media are counted over, and what mini reads of them."""

import torch

from mmsdk.models.mini.words import asked, conversation
from mmsdk.prompt import Prompt, Text, Turn
from mmsdk.vision.types import Image


def image(height: int, width: int) -> Image:
    return Image(torch.zeros(3, height, width, dtype=torch.uint8), f"{height}x{width}")


def test_a_conversation_is_its_turns_and_its_media_are_counted_over_all_of_them() -> None:
    first, second = image(4, 4), image(8, 8)
    turns = (
        Turn("system", (Text("Be brief."),)),
        Turn("user", (first, Text("Which?"), Text("Tell."))),
        Turn("assistant", ()),
        Turn("user", (Text("And"), second)),
        Turn("user", (Text("this?"),)),
    )
    prompt = Prompt.talk(turns)
    assert prompt.turns == turns and prompt.media == (first, second) and turns[1].text == "Which?\nTell."
    assert Prompt.of([first], "Which?").turns == (Turn("user", (first, Text("Which?"))),)


def test_mini_reads_turns_in_the_words_of_its_questions() -> None:
    assert conversation([("user", "Which?")]) == asked("Which?") == "Question: Which?\nAnswer:"
    turns = [("system", "Be brief."), ("user", "Which?"), ("assistant", "Red."), ("user", "Sure?"), ("user", "Really?")]
    assert conversation(turns) == ("Be brief.\nQuestion: Which?\nAnswer: Red.\nQuestion: Sure?\nAnswer:\nQuestion: Really?\nAnswer:")
