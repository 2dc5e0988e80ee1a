"""Copies of pipelines and conversations: what a deep one shares with its origin, and what pickle says."""

import copy
import pickle

import pytest
import torch

from mmsdk.answer import Answer
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.recall import Recall, Sights, recalling
from mmsdk.vision.types import Image

QUESTION = "What is in the picture?"


def picture() -> Image:
    return Image(torch.randint(0, 256, (3, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))


def answer(pipe: Pipeline) -> Answer:
    return pipe(picture(), QUESTION, max_tokens=6)


@pytest.mark.parametrize("kv", ["dense", "paged", "int8", "snapkv:0.5"])
def test_a_deep_copy_answers_alike_and_shares_nothing(small: Mini, kv: str) -> None:
    pipe = Pipeline(small, recall=recalling(kv), batch_size=3)
    first = answer(pipe)
    twin = copy.deepcopy(pipe)
    assert twin.batch_size == 3 and answer(twin) == first
    mine = {part.data_ptr() for part in pipe.vlm.decoder.parameters()}
    assert mine.isdisjoint(part.data_ptr() for part in twin.vlm.decoder.parameters())
    with torch.no_grad():
        for part in twin.vlm.decoder.parameters():
            part.mul_(-1)
    assert answer(twin) != first and answer(pipe) == first


def test_a_deep_copy_recalls_nothing_yet_and_then_for_itself(small: Mini) -> None:
    pipe = Pipeline(small, recall=Recall(recalling("paged").memory, Sights(2**20)))
    answer(pipe)
    kept, twin = pipe.recall.sights.nbytes, copy.deepcopy(pipe)
    assert kept > 0 and twin.recall.sights.nbytes == 0 and twin.recall.sights.most == 2**20
    assert answer(twin).tokens.recalled == 0 and answer(twin).tokens.recalled > 0
    assert pipe.recall.sights.nbytes == kept == twin.recall.sights.nbytes


def test_a_shallow_copy_is_the_same_model_and_memory(small: Mini) -> None:
    pipe = Pipeline(small, recall=recalling("paged"))
    twin = copy.copy(pipe)
    assert twin is not pipe and twin == pipe and twin.vlm is pipe.vlm and twin.recall is pipe.recall


@pytest.mark.parametrize("kv", ["dense", "int4"])
def test_a_conversation_goes_on_in_a_deep_copy_of_it(small: Mini, kv: str) -> None:
    """Of one in fewer bits what was rounded is copied as it is."""
    chat = Pipeline(small, recall=recalling(kv)).chat()
    chat(picture(), QUESTION * 12)
    twin = copy.deepcopy(chat)
    assert twin("And beside it?") == chat("And beside it?")
    twin.undo()
    assert len(twin.turns) == 1 and len(chat.turns) == 2


def test_pickle_is_refused_and_told_what_to_do(small: Mini) -> None:
    with pytest.raises(InputError, match=r"cannot be pickled.*mmsdk\.pipeline\(\.\.\.\) there"):
        pickle.dumps(Pipeline(small))
