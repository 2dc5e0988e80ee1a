"""The bench of a GPU: its rows at a tiny size by references, and what it says where there is none."""

import pytest
import torch

from mmsdk.apps.bench.gpu import Gpu, Sizes, measured
from mmsdk.apps.cli import main
from mmsdk.decoder.config import DecoderConfig
from mmsdk.kernels.older import KINDS

SMALL = Sizes(
    tokens=8, context=40, rows=2, heads=4, kv_heads=2, width=16, side=16, copied=1024, matrix=(24, 64),
    model=DecoderConfig(vocabulary=32, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, inner=24, context=256),
)  # fmt: skip


def test_every_aim_has_rows_and_is_judged_by_the_worst_of_them() -> None:
    rows = measured(torch.device("cpu"), SMALL)
    assert [row["what"] for row in rows] == ["roof"] * 2 + ["prefill"] * 2 + ["paged decode"] * 7 + ["product"] * 6 + ["step"] * 2
    assert [str(row["case"]).split(",")[0] for row in rows if row["what"] == "paged decode"] == ["bf16", *KINDS]
    assert len({tuple(row) for row in rows}) == 1
    assert all(isinstance(row["ms"], float) and row["ms"] > 0 and isinstance(row["rate"], float) and row["rate"] > 0 for row in rows)
    for row, share in zip([row for row in rows if row["what"] == "paged decode"], (0.9, 0.84, *(1.0,) * 5), strict=True):
        row["share"] = share
    judged = {str(aim["aim"]): aim for aim in Gpu().aims(rows)}
    assert set(judged) == {"prefill: share", "prefill: ratio", "paged decode: share", "step: ratio"}
    assert judged["paged decode: share"]["reached"] == 0.84 and judged["paged decode: share"]["met"] is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "torch sees none here" in error


@pytest.mark.parametrize("name", ["tokens", "context", "rows"])
def test_sizes_below_one_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"gpu:{name}=0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err
