"""The bench of compression as a whole, on small random parts in the place of mini: its rows, what it leaves out, and how it goes on."""

from pathlib import Path

import pytest

from mmsdk.apps.bench import compress
from mmsdk.apps.bench.compress import Compress
from mmsdk.errors import InputError
from mmsdk.models.mini.family import Mini

KEYS = (
    "method stage media retention batch n accuracy accuracy_full encode_ms compress_ms prefill_ms decode_ms kv_bytes nqe coverage speedup "
    "choose_ms encoder_flops worse better"
)


def test_rows_of_methods_and_of_whole_answers(
    small: Mini, emoji: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compress, "load", lambda *args: small)
    plot, saved = tmp_path / "plot.svg", tmp_path / "rows.jsonl"
    bench = Compress(methods="deft+tome", quick=True, plot=str(plot), saved=str(saved))
    rows = bench()
    assert all(list(row) == KEYS.split() for row in rows)
    of = [row for row in rows if row["method"] == "deft" and row["media"] == "clip"]
    assert [(row["retention"], row["batch"]) for row in of] == [
        (share, batch) for share in (0.5, 0.25, 0.2, 0.1, 0.05, 0.01) for batch in (4, 1)
    ]
    assert all(row["n"] == 4 and row["nqe"] is None and row["accuracy_full"] is not None for row in of)
    held = [float(str(row["kv_bytes"])) for row in of if row["batch"] == 4]
    assert held == sorted(held, reverse=True)
    # of sixteen patches two blocks of this encoder leave four
    assert {row["retention"] for row in rows if row["method"] == "tome" and row["media"] == "image"} == {0.5, 0.25}
    assert "tome:0.1 left out for images" in capsys.readouterr().err
    chained = [row for row in rows if row["method"] == "tome + simplecluster" and row["batch"] == 4]
    assert {row["stage"] for row in chained} == {"encoder+projector"} and {row["media"] for row in chained} == {"image"}
    assert [row["retention"] for row in chained] == [0.25, 0.1, 0.05, 0.01]
    ends = {row["method"]: row for row in rows if row["media"] == "clip of 4 frames"}
    assert set(ends) == {"identity", "simplecluster", "deft"} and ends["identity"]["speedup"] == 1.0
    assert {row["method"] for row in rows if row["media"] == "image, in turn"} == {"identity", "tome"}
    # choosing inside the decoder is told apart from what else its prefill takes
    assert all(float(str(row["choose_ms"])) > float(str(row["compress_ms"])) and row["encoder_flops"] == 1.0 for row in of)
    work = [float(str(row["encoder_flops"])) for row in rows if row["method"] == "tome" and row["media"] == "image" and row["batch"] == 4]
    assert 1 > work[0] > work[1] > 0.2
    judged = {str(row["aim"]): row for row in bench.aims(rows)}
    assert judged["deft, clips at 20 %"]["wanted"] == "94.8 % of full"
    assert {row["met"] for row in judged.values()} <= {"yes", "no", "cannot tell"}
    assert plot.read_text(encoding="utf-8").startswith("<svg")
    # all of it is known by now
    assert Compress(methods="deft+tome", quick=True, saved=str(saved))() == rows


@pytest.mark.parametrize(
    ("knobs", "hint"),
    [({"methods": "dift"}, "'dift' is not known"), ({"clips": 0}, "clips"), ({"plot": "nowhere/at/all.svg"}, "no folder")],
)
def test_what_cannot_be_measured_is_named(knobs: dict[str, str | int], hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        Compress(**knobs)()
