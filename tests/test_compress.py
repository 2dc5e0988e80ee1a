import inspect
import re
from pathlib import Path

import pytest
import torch

from mmsdk.compress import Compression, Step, compression
from mmsdk.errors import BudgetError, PluginError
from mmsdk.tokencomp.methods.random import Random
from mmsdk.vision.types import VisualTokens


def tokens_of(rows: int, columns: int) -> VisualTokens:
    n = rows * columns
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(rows), torch.arange(columns))
    return VisualTokens(torch.randn(n, 4), positions, torch.ones(n), (1, rows, columns), torch.zeros(1), torch.empty(0))


def test_names_amounts_and_knobs() -> None:
    assert compression("random:0.25,seed=3") == Compression((Step(Random(seed=3), 0.25),))
    assert compression("random:64") == Compression((Step(Random(), 64),))
    step = Step(Random(), 0.5)
    assert compression([step, "random:8"]).steps == (step, Step(Random(), 8))
    assert compression(compression("random:8")) == compression("random:8")


@pytest.mark.parametrize(
    "written",
    [
        "identity",
        "uniform:8",
        "random:0.25,seed=3",
        "simplecluster:auto@prefill<80ms",
        "simplecluster:auto@prefill<80.1234567ms",
        ["uniform:most@64", "fastv:most@8"],
        "identity:most@1.0",
        ["tome:0.5", "fastv:9"],
        ["uniform:8", "proportional"],
        "dora",
    ],
)
def test_a_compression_is_written_as_it_is_read(written: str | list[str]) -> None:
    spec = compression(written).spec
    assert compression(spec) == compression(written)
    assert compression(written).at_most() == compression(compression(written).at_most().spec)
    assert spec == ("dora:adaptive" if written == "dora" else written)


def test_counts_apply_to_each_input_and_fractions_to_its_own_length() -> None:
    """PB-02: three images of different grids at budget 64 give 64 each."""
    images = [tokens_of(16, 16), tokens_of(8, 20), tokens_of(13, 19)]
    assert [len(item.tokens) for item in compression("uniform:64")(images)] == [64, 64, 64]
    assert [len(item.tokens) for item in compression("uniform:0.25")(images)] == [64, 40, 62]


def test_identity_and_nothing_keep_everything_bit_for_bit() -> None:
    """PP-09."""
    image = tokens_of(4, 4)
    for spec in ("identity", [], "uniform:1.0"):
        (result,) = compression(spec)([image])
        assert torch.equal(result.tokens.features, image.features)
        assert torch.equal(result.audit.assignment, torch.arange(16))


def test_steps_run_in_order_and_the_audit_speaks_of_the_source() -> None:
    image = tokens_of(8, 8)
    (result,) = compression(["random:0.5,seed=1", "uniform:8"])([image])
    assert len(result.tokens) == 8 and result.audit.method == "random+uniform" and result.audit.assignment.shape == (64,)
    alive = result.audit.assignment >= 0
    assert torch.equal(image.features[alive], result.tokens.features)


def test_steps_part_where_the_projector_is_needed() -> None:
    """What needs no side of it stays in front, where there is less to be projected."""
    spec = compression(["tome:0.5", "random:0.5", "visionzip:0.5", "uniform:0.5", "cdpruner:0.5", "random:9", "fastv:0.5"])
    assert spec.before.steps == spec.steps[:4] and spec.behind.steps == spec.steps[4:]
    assert spec.asks and spec.behind.asks and not spec.before.asks
    for plain in ("uniform:4", ["visionzip:0.5", "random:2"], "tome:0.5", []):
        assert compression(plain).behind == Compression() and compression(plain).before == compression(plain)
    assert compression("deft:4").before == Compression() == compression("simplecluster:4").before


@pytest.mark.parametrize(
    "spec", [["simplecluster:0.5", "visionzip:0.5"], ["uniform:0.5", "p4q:0.5", "evs:0.5"], ["fastv:0.5", "uniform:0.5"]]
)
def test_a_step_for_features_behind_one_for_embeddings_is_refused(spec: list[str]) -> None:
    with pytest.raises(PluginError, match="encoder, then features, then projector, then decoder"):
        compression(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "uniform",
        "uniform:0",
        "uniform:-1",
        "uniform:1.5",
        "uniform:nan",
        "uniform:0.0",
        "uniform:many",
        "uniform:٦٤",
        "uniform:6_4",
        "uniform:0.٦",
    ],
)
def test_impossible_amounts(spec: str) -> None:
    """PP-09: they are refused before any model is loaded."""
    with pytest.raises(BudgetError):
        compression(spec)


@pytest.mark.parametrize(("spec", "hint"), [("unifrom:64", "uniform"), ("random:64,sed=1", "seed"), ("", "names no method")])
def test_wrong_names_say_what_is_near(spec: str, hint: str) -> None:
    with pytest.raises(PluginError, match=hint):
        compression(spec)


@pytest.mark.parametrize("spec", [64, 0.5, True, None, object(), b"uniform:64", [5], [None], ("uniform", 4), {"uniform": 4}])
def test_what_names_no_method_is_told_how_to_write_one(spec: object) -> None:
    # without the check of types that tests add
    with pytest.raises((PluginError, BudgetError), match="uniform:64"):
        inspect.unwrap(compression)(spec)  # type: ignore[arg-type]  # the mistake under test


def test_more_than_there_is() -> None:
    with pytest.raises(BudgetError, match="16 visual tokens"):
        compression("uniform:100")([tokens_of(4, 4)])


def test_the_method_that_the_guide_adds_is_one() -> None:
    """What docs/compression.md would have in a file keeps the tokens of largest norm."""
    page = (Path(__file__).parents[1] / "docs" / "compression.md").read_text(encoding="utf-8")
    file = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[-1]
    module: dict[str, object] = {"__name__": "loudest"}
    exec(compile(file, "loudest.py", "exec", dont_inherit=True), module)
    loudest, image = module["Loudest"], tokens_of(4, 4)
    assert isinstance(loudest, type)
    (result,) = Compression((Step(loudest(), 4),))([image])
    wanted = image.features.norm(dim=1).topk(4).indices.sort().values
    assert torch.equal(result.tokens.features, image.features[wanted]) and result.audit.method == "loudest"


def test_at_most_keeps_all_of_what_has_fewer_tokens_than_the_count() -> None:
    """A server's own count; a count that was asked for stays an error, and shares are what they were."""
    images = [tokens_of(16, 16), tokens_of(2, 3)]
    asked = compression(["random:64", "uniform:8"])
    with pytest.raises(BudgetError, match=r"budget 64 tokens is outside \[1, 6\].*; a share such as 0\.25 fits every input"):
        asked(images)
    results = asked.at_most()(images)
    assert [len(item.tokens) for item in results] == [8, 6] and torch.equal(results[1].tokens.features, images[1].features)
    assert [len(item.tokens) for item in compression("uniform:0.25").at_most()(images)] == [64, 2]
    assert compression(["tome:64", "fastv:64"]).at_most().inside_encoder[0].budget(6).count == 6
    assert compression(["tome:64", "fastv:64"]).at_most().inside_decoder[0].budget(6).count == 6
    assert asked.at_most() != asked == compression(["random:64", "uniform:8"])
