"""The follow-up bench on the real model: from the cold copy nothing is encoded, and as many tokens are kept."""

from mmsdk.apps.bench.followup import Followup
from mmsdk.weights.bundle import Bundle


def test_rows_say_what_the_cold_copy_saves(mini_bundle: Bundle) -> None:
    rows = Followup(repeats=1, frames=2)()
    assert [(row["media"], row["asked"]) for row in rows] == [
        (media, asked) for media in ("image", "clip") for asked in ("itself", "cold copy")
    ]
    for itself, copy in zip(rows[::2], rows[1::2], strict=True):
        assert itself["kept"] == copy["kept"] and itself.keys() == copy.keys()
        encode, recall = itself["encode_ms"], copy["encode_ms"]
        assert isinstance(encode, float) and isinstance(recall, float) and recall < 0.2 * encode
