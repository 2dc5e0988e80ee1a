"""Policies of the memory in pipelines: batches, compression, streams, families, and what refuses them."""

import pytest
import torch

from mmsdk.compress import compression
from mmsdk.errors import BudgetError
from mmsdk.kv.policy_memory import policy_of
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Answer, Pipeline
from mmsdk.recall import recalling
from mmsdk.vision.types import Image

CLASSIC = ["streaming:24", "snapkv:0.3,window=8,interval=2"]
# Beside a longer row a shorter one would have other levels, or read more.
LEVELS = ["tiered:0.5", "tiered:20", "quest:0.999,page=4,dense=0", "santa:0.999,team=2,recent=1,sinks=1"]


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    pixels = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image(pixels)


def texts(answers: list[object]) -> list[str]:
    assert all(isinstance(answer, Answer) for answer in answers)
    return [str(answer) for answer in answers]


def test_a_full_memory_answers_as_the_plain_one_does(small: Mini) -> None:
    pairs = [(picture(1), "What is it?"), (picture(2, 84, 56), "Which colour is it, and how many of them are there?")]
    plain, full = Pipeline(small), Pipeline(small, recall=recalling("full"))
    assert texts(plain(pairs, max_tokens=3)) == texts(full(pairs, max_tokens=3))


@pytest.mark.parametrize("kv", CLASSIC + LEVELS)
def test_batches_streams_and_single_questions_agree(small: Mini, kv: str) -> None:
    """Rows of different lengths, one of them without a picture, ended one by one."""
    pipe = Pipeline(small, recall=recalling(kv))
    pairs = [(picture(1), "What is it?"), ([], "Say something about the number seven, please."), (picture(2, 84, 56), "Same?")]
    together = texts(pipe(pairs, max_tokens=3))
    assert together == [str(pipe(*pair, max_tokens=3)) for pair in pairs]
    assert "".join(pipe.stream(*pairs[2], max_tokens=3)) == together[2]


def test_what_is_compressed_before_is_evicted_after(small: Mini) -> None:
    pairs = [(picture(1), "What is it?"), (picture(2, 84, 56), "Which colour?")]
    for kv, steps in (("streaming:12", "uniform:0.5"), ("snapkv:12,window=4", "fastv:0.5")):
        pipe = Pipeline(small, compression(steps), recall=recalling(kv))
        assert texts(pipe(pairs, max_tokens=3)) == [str(pipe(*pair, max_tokens=3)) for pair in pairs]


@pytest.mark.parametrize("kv", ["streaming:2", "streaming:4"])
def test_a_count_with_no_room_beside_the_sinks_is_refused(kv: str) -> None:
    with pytest.raises(BudgetError, match="sinks=4.*keep at least 5"):
        policy_of(kv)


def test_dense_layers_leave_one_that_lets_go() -> None:
    with pytest.raises(BudgetError, match="dense=3 keeps everything in all 3 layers"):
        policy_of("window:64,dense=3").cache(3, 1, "cpu")
    assert policy_of("window:64,dense=2").cache(3, 1, "cpu").position.shape == (1,)
