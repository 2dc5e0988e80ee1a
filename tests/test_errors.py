"""The tree of errors: messages that name their item, and places in a batch that survive."""

import pickle

import pytest

from mmsdk import errors
from mmsdk.errors import InputError, MmsdkError


@pytest.mark.parametrize("name", errors.__all__)
def test_one_except_catches_everything_raised_on_purpose(name: str) -> None:
    assert issubclass(getattr(errors, name), MmsdkError)


@pytest.mark.parametrize("name", ["InputError", "BudgetError", "PluginError"])
def test_wrong_values_are_value_errors_too(name: str) -> None:
    assert issubclass(getattr(errors, name), ValueError)


@pytest.mark.parametrize(
    ("item", "index", "message"),
    [
        ("", None, "not a picture"),
        ("cat.jpg", None, "cat.jpg: not a picture"),
        ("", 3, "item 4 (index 3): not a picture"),
        ("cat.jpg", 3, "item 4 (index 3, cat.jpg): not a picture"),
        ("cat.jpg", 0, "item 1 (index 0, cat.jpg): not a picture"),
    ],
)
def test_an_input_error_names_its_item(item: str, index: int | None, message: str) -> None:
    """IN-10: people count from 1, `.index` from 0; who reads the message is left in no doubt."""
    assert str(InputError("not a picture", item=item, index=index)) == message


def test_an_input_error_learns_its_place_and_keeps_the_rest() -> None:
    first = InputError("not a picture", item="cat.jpg")
    placed = first.at(2)
    assert (placed.message, placed.item, placed.index) == ("not a picture", "cat.jpg", 2)
    assert str(placed) == "item 3 (index 2, cat.jpg): not a picture"
    assert first.index is None
    assert str(placed.at(5)) == "item 6 (index 5, cat.jpg): not a picture"


def test_an_input_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(InputError("not a picture", item="cat.jpg", index=1)))
    assert str(error) == "item 2 (index 1, cat.jpg): not a picture"
    assert (error.message, error.item, error.index) == ("not a picture", "cat.jpg", 1)
