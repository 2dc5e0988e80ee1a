"""How likely what was said was: against the distribution written out, whatever was done to the scores before a token was taken."""

import math

import pytest
import torch
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.logprobs import likelihoods
from mmsdk.generate.loop import Reply
from mmsdk.generate.text import TextStream

LOGITS = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 4


def slowly(row: Tensor) -> list[float]:
    """log(exp(s) / sum of exp(s)), in double precision and without a trick."""
    raised = [math.exp(score) for score in row.tolist()]
    return [math.log(one / math.fsum(raised)) for one in raised]


def test_they_are_those_of_the_models_own_distribution_in_order() -> None:
    ids = torch.tensor([4, 19, 0])
    found = likelihoods(LOGITS, ids, [3, 0, 50])
    assert found[1] == ()
    for row, most in ((0, 3), (2, 20)):
        ((said,), wanted) = found[row], slowly(LOGITS[row])
        assert said.id == int(ids[row]) and said.logprob == pytest.approx(wanted[said.id], abs=1e-5)
        best = sorted(range(20), key=lambda token: -wanted[token])[:most]
        assert [one.id for one in said.top] == best
        assert [one.logprob for one in said.top] == pytest.approx([wanted[token] for token in best], abs=1e-5)


def test_nothing_is_computed_where_nobody_asks() -> None:
    broken = torch.empty(2, 0)
    assert likelihoods(broken, torch.tensor([0, 1]), [0, 0]) == [(), ()]


def test_a_word_that_cannot_be_and_half_precision() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], dtype=torch.bfloat16)
    ((said,),) = likelihoods(logits, torch.tensor([1]), [3])
    assert said.logprob == -math.inf and [one.id for one in said.top] == [2, 0, 1]
    assert said.top[0].logprob == pytest.approx(-math.log1p(math.exp(-1)), abs=1e-6)


def test_an_end_says_nothing_and_a_stop_string_what_its_tokens_were() -> None:
    (one,) = likelihoods(LOGITS[:1], torch.tensor([5]), [2])
    row = Reply(0, GenerationConfig(stop=("6",), logprobs=2), TextStream(lambda ids: "".join(map(str, ids)), ("6",)), frozenset({9}))
    assert row.push(5, one).logprobs == one and row.push(6, one).logprobs == one
    ended = Reply(0, GenerationConfig(logprobs=2), TextStream(str), frozenset({9}))
    assert ended.push(9, one).logprobs == ()


@pytest.mark.parametrize("count", [-1, 1001, 10**9])
def test_more_than_anybody_reads_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="logprobs: .* is not a whole number from 0 to 1,000"):
        GenerationConfig(logprobs=count)
    assert GenerationConfig(logprobs=1000).logprobs == 1000
