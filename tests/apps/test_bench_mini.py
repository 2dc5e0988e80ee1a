"""The bench of mini on two scenes: rows of what was asked, the controls below, and the mean over all that has one right answer."""

from pathlib import Path

import pytest

from mmsdk.apps.bench.mini import Mini, _overall, _Score
from mmsdk.weights.bundle import Bundle


@pytest.fixture(scope="module")
def rows(mini_bundle: Bundle, emoji: Path, photos: Path) -> dict[str, dict[str, float]]:
    """By question type."""
    return {row.pop("type"): row for row in Mini(scenes=2, photos=0, clips=0, renders=0, captions=1)()}


def test_each_type_is_a_row_and_the_last_is_their_mean(rows: dict[str, dict[str, float]]) -> None:
    *types, last = rows
    assert last == "all but captions" and rows["scene: caption"]["n"] == 1
    assert {"scene: object", "scene: place"} <= set(types) and all(name.startswith("scene: ") for name in types)
    asked = [rows[name] for name in types if name != "scene: caption"]
    assert rows[last]["n"] == sum(row["n"] for row in asked) > 8
    for share in ("accuracy", "blind", "shuffled"):
        right = [row["n"] * row[share] for row in asked]
        # before another picture, which may have fewer tokens, other questions may fit
        assert share == "shuffled" or all(abs(one - round(one)) < 1e-6 for one in right), "a whole number of answers is right"
        assert rows[last][share] == pytest.approx(sum(right) / rows[last]["n"])


def test_who_does_not_see_the_picture_is_right_less_often(rows: dict[str, dict[str, float]]) -> None:
    found = rows["all but captions"]
    assert found["accuracy"] > found["blind"] and found["accuracy"] > found["shuffled"]
    assert rows["scene: caption"]["accuracy"] > rows["scene: caption"]["blind"]


def test_questions_count_alike_whatever_their_type() -> None:
    scores = [_Score("scene: count", 1, 1.0, 0.0, 0.5), _Score("clip: order", 3, 0.0, 1.0, 0.5)]
    assert _overall(scores) == _Score("all but captions", 4, 0.25, 0.75, 0.5)
