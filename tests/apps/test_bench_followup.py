"""The follow-up bench on the real model: from the cold copy nothing is encoded, and in pages what was shown is not run again either."""

import pytest

from mmsdk.apps.bench.followup import Followup
from mmsdk.errors import InputError
from mmsdk.kv.pages import PAGE
from mmsdk.weights.bundle import Bundle

ASKED = ["itself", "cold copy", "whole", "paged first", "paged again"]


def test_rows_say_what_asking_again_saves(mini_bundle: Bundle) -> None:
    rows = Followup(repeats=1, frames=2)()
    assert [(row["media"], row["asked"]) for row in rows] == [(media, asked) for media in ("image", "clip") for asked in ASKED]
    for media in ("image", "clip"):
        itself, copy, whole, first, again = (row for row in rows if row["media"] == media)
        assert itself["kept"] == copy["kept"] and all(row.keys() == itself.keys() for row in rows)
        assert whole["kept"] == first["kept"] == again["kept"] and itself["recalled"] == whole["recalled"] == first["recalled"] == 0
        for looking, known in ((itself, copy), (whole, again)):
            encode, recall = looking["encode_ms"], known["encode_ms"]
            assert isinstance(encode, float) and isinstance(recall, float) and recall < 0.2 * encode
        # all that was shown is known, but for what does not fill a block
        kept, recalled = again["kept"], again["recalled"]
        assert isinstance(kept, int) and isinstance(recalled, int) and recalled > kept - PAGE


def test_rounds_of_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="repeats"):
        Followup(repeats=0)()
