import copy
import pickle

from mmsdk.answer import Answer, Timings, Tokens


def test_an_answer_is_a_str_that_carries_its_cost() -> None:
    answer = Answer("a cup", Tokens(256, 64, 80, 3), Timings(1.0, 2.0, 3.0, 4.0, 5.0), seed=7, finish="length")
    assert answer == "a cup" and answer.upper() == "A CUP" and f"{answer}!" == "a cup!"
    assert answer.tokens.kept == 64 and answer.timings.total == 15 and answer.seed == 7 and answer.audit == ()


def test_copies_and_pickles_keep_everything() -> None:
    answer = Answer("a cup", Tokens(256, 64, 80, 3), Timings(1.0, 2.0, 3.0, 4.0, 5.0), seed=7, finish="length", score=-1.5)
    for twin in (copy.copy(answer), copy.deepcopy(answer), pickle.loads(pickle.dumps(answer))):
        assert twin == answer and twin.tokens == answer.tokens and twin.timings == answer.timings
        assert (twin.seed, twin.finish, twin.score) == (7, "length", -1.5)
