"""Normalisation by published formulas and back, statistics from files, and the linter that lets nothing through in silence."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.contract import Command, Contract, Feature
from mmsdk.vla.lint import Normalization, clip_rate, lint, looks_normalised, not_finite
from mmsdk.vla.normalize import NEEDS, Normalizer
from mmsdk.vla.policy import load_policy
from mmsdk.vla.statistics import parse_statistics, read_statistics
from mmsdk.vla.types import ActionChunk, Request

MODES = list(NEEDS)
PLAIN = torch.zeros(3, dtype=torch.bool)


def statistics_of(data: np.ndarray) -> dict[str, torch.Tensor]:
    values = {"mean": data.mean(0), "std": data.std(0), "min": data.min(0), "max": data.max(0)}
    values |= {name: np.quantile(data, share, axis=0) for name, share in (("q01", 0.01), ("q99", 0.99), ("q10", 0.1), ("q90", 0.9))}
    return {name: torch.from_numpy(vector) for name, vector in values.items()}


def data(seed: int = 0) -> np.ndarray:
    """Radians, millimetres and a number that never changes."""
    generator = np.random.default_rng(seed)
    return np.stack((generator.normal(0.5, 0.2, 500), generator.uniform(-300, 900, 500), np.full(500, 0.7)), axis=1)


def by_formula(mode: str, x: np.ndarray, s: dict[str, np.ndarray], eps: float) -> np.ndarray:
    if mode == "identity":
        return x
    if mode == "mean_std":
        return (x - s["mean"]) / (s["std"] + eps)
    low, high = (s[name] for name in NEEDS[mode])
    return 2 * (x - low) / (high - low + eps) - 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_values_are_those_of_the_published_formulas(mode: str, eps: float) -> None:
    values, statistics = data(), statistics_of(data())
    got = Normalizer.of(mode, statistics, PLAIN, eps)(torch.from_numpy(values)).numpy()
    wanted = by_formula(mode, values, {name: vector.numpy() for name, vector in statistics.items()}, eps)
    np.testing.assert_allclose(got[:, :2], wanted[:, :2], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=3, max_size=3), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_vr_05_back_from_normalised_is_the_same(mode: str, numbers: list[float], seed: int) -> None:
    normalizer = Normalizer.of(mode, statistics_of(data(seed)), PLAIN)
    values = torch.tensor(numbers, dtype=torch.float32)
    normal = normalizer(values)
    assert bool(normal.isfinite().all()) and normal.dtype == torch.float32
    torch.testing.assert_close(normalizer.inverse(normal), values, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_vr_05_a_number_that_never_changed_stays_tame(mode: str) -> None:
    normalizer = Normalizer.of(mode, statistics_of(data()), PLAIN)
    assert abs(float(normalizer(torch.tensor([0.5, 0.0, 0.7 + 1e-3], dtype=torch.float64))[2])) < 1.01


def test_plain_numbers_stay_as_they_are() -> None:
    normalizer = Normalizer.of("quantiles", statistics_of(data()), torch.tensor([False, True, False]))
    assert float(normalizer(torch.tensor([0.5, 123.0, 0.7]))[1]) == 123.0


# ------------------------------------------------------------------------------------------------ statistics from files

STATE = {"mean": [0.0, 1.0], "std": [1.0, 2.0], "q01": [-2.0, -3.0], "q99": [2.0, 5.0]}


@pytest.mark.parametrize(
    "tree",
    [
        {"observation.state": STATE, "action": STATE, "observation.images.front": {"mean": [[[0.5]]]}},
        {"norm_stats": {"state": STATE, "actions": STATE}},
        {"bridge_orig": {"proprio": STATE, "action": {**STATE, "mask": [True, False]}, "num_trajectories": 3}},
    ],
    ids=["lerobot", "openpi", "openvla"],
)
def test_statistics_of_three_projects_become_one(tree: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text(json.dumps(tree))
    statistics = read_statistics(path)
    assert set(statistics) == {"state", "action"} and statistics["action"]["q99"].tolist() == [2.0, 5.0]


def test_openvlas_mask_leaves_its_numbers_as_they_are(tmp_path: Path) -> None:
    """Its own formula: np.where(mask, 0.5 (a + 1) (q99 - q01 + 1e-8) + q01, a)."""
    mask, low, high = [True, True, False], np.array([-2.0, -3.0, 0.0]), np.array([2.0, 5.0, 0.9])
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps({"bridge_orig": {"action": {"q01": low.tolist(), "q99": high.tolist(), "mask": mask}}}))
    normalizer = Normalizer.of("quantiles", read_statistics(path)["action"], PLAIN)
    made = np.array([[0.5, -1.0, 0.996], [-0.2, 0.3, 0.0]])
    wanted = np.where(mask, 0.5 * (made + 1) * (high - low + 1e-8) + low, made)
    np.testing.assert_allclose(normalizer.inverse(torch.from_numpy(made)).numpy(), wanted, atol=1e-12)
    with pytest.raises(ModelError, match="mask is no list of true and false"):
        parse_statistics({"action": {**STATE, "mask": [1, 0]}})
    with pytest.raises(ModelError, match="a mask of 2 numbers for 3"):
        Normalizer.of("quantiles", {**good(), "mask": torch.ones(2)}, PLAIN)


def test_vr_25_of_several_data_sets_one_is_named() -> None:
    tree = {"bridge_orig": {"action": STATE}, "fractal": {"action": {**STATE, "mean": [9.0, 9.0]}}}
    with pytest.raises(ModelError, match="several data sets, and none was chosen; there is bridge_orig, fractal"):
        parse_statistics(tree)
    with pytest.raises(ModelError, match="no data set 'bridge'; there is bridge_orig, fractal"):
        parse_statistics(tree, "bridge")
    assert parse_statistics(tree, "fractal")["action"]["mean"].tolist() == [9.0, 9.0]
    assert parse_statistics({"only": {"action": STATE}})["action"]["std"].tolist() == [1.0, 2.0]


# ----------------------------------------------------------------------------------------------------------- the linter


class Still:
    def reset(self, episode: int) -> None:
        del episode

    def __call__(self, request: Request) -> ActionChunk:
        return ActionChunk(torch.zeros(1, 3), request.observation.stamp)


JOINTS = Feature("joints", "joint", 2, "rad", (-3.2,) * 2, (3.2,) * 2)
GRIPPER = Feature("gripper", "gripper", 1, "fraction", (0.0,), (1.0,), opened=0.0, closed=1.0)
ROBOT = Contract(
    "robot", 10.0, (), (JOINTS, GRIPPER),
    (Command(JOINTS, "position", "absolute", "joints"), Command(GRIPPER, "position", "absolute", "gripper")),
)  # fmt: skip


def good() -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(0)
    return statistics_of(np.stack((generator.uniform(-2, 2, 400), generator.normal(1.0, 0.3, 400), generator.integers(0, 2, 400)), axis=1))


def linted(**changes: dict[str, torch.Tensor]) -> str:
    groups = {"state": good(), "action": good()} | changes
    return str(lint(ROBOT, Normalization("quantiles", "mean_std", groups)))


def test_a_policy_that_fits_passes_every_check() -> None:
    report = lint(ROBOT, Normalization("quantiles", "mean_std", {"state": good(), "action": good()}, width=32))
    report.require()
    assert not report.faults and len(report.checks) > 10


def test_vr_03_missing_or_infinite_statistics_are_named() -> None:
    infinite = good() | {"mean": torch.tensor([float("inf"), 0, 0], dtype=torch.float64)}
    with pytest.raises(ModelError, match="missing or not finite: mean"):
        load_policy(Still(), ROBOT, ROBOT, Normalization("quantiles", "mean_std", {"state": good(), "action": infinite}))
    with pytest.raises(ModelError, match="action needs|missing or not finite: mean, std"):
        load_policy(Still(), ROBOT, ROBOT, Normalization("identity", "mean_std", {}))


def test_vr_04_one_group_without_statistics_is_refused_unless_declared() -> None:
    with pytest.raises(ModelError, match="the policy is not loaded\nfeature"):
        load_policy(Still(), ROBOT, ROBOT, Normalization("quantiles", "mean_std", {"state": good()}))
    assert load_policy(Still(), ROBOT, ROBOT, Normalization("quantiles", "identity", {"state": good()}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({name: vector[:2] for name, vector in good().items()}, "mean has 2"),
        (good() | {"std": torch.tensor([0.1, -0.1, 0.1], dtype=torch.float64)}, "std is not negative  [1]"),
        (good() | {"q01": torch.tensor([5.0, 0, 0], dtype=torch.float64)}, "q01 <= q99"),
        ({name: vector * 57.3 for name, vector in good().items()}, "data within -3.2..3.2 rad"),
        (good() | {"min": torch.tensor([-2.0, 0, -1], dtype=torch.float64)}, "the data reaches from -1 to 1"),
    ],
    ids=["short", "negative", "crossed", "degrees", "polarity"],
)
def test_what_does_not_fit_stands_in_the_table(change: dict[str, torch.Tensor], told: str) -> None:
    table = linted(action=change)
    lines = [line for line in table.splitlines() if not line.endswith("ok")]
    assert any(" ".join(told.split()) in " ".join(line.split()) for line in lines[1:]), table


def test_a_name_that_is_no_features_is_not_taken_for_plain() -> None:
    report = lint(ROBOT, Normalization("identity", "identity", {}, plain=frozenset({"griper", "joints"})))
    assert [check.fault for check in report.faults] == ["there is no griper"]


def test_a_number_that_never_changed_stays_tame_without_an_eps() -> None:
    constant = {"mean": torch.zeros(1, dtype=torch.float64), "std": torch.zeros(1, dtype=torch.float64)}
    normalizer = Normalizer.of("mean_std", constant, torch.zeros(1, dtype=torch.bool), eps=0.0)
    assert float(normalizer(torch.ones(1))) == float(normalizer.inverse(torch.ones(1))) == 1.0
    broken = good() | {"std": torch.tensor([1e-320, 1.0, 1.0], dtype=torch.float64)}
    report = lint(ROBOT, Normalization("identity", "mean_std", {"action": broken}, eps=0.0))
    assert [check.fault for check in report.faults if check.rule == "back from normalised"] == ["[0]"]


@pytest.mark.parametrize("wrong", [{"eps": float("nan")}, {"eps": -1.0}, {"eps": float("inf")}, {"width": -3}])
def test_settings_that_normalise_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="normalization"):
        Normalization("mean_std", "mean_std", {}, **wrong)


def test_a_width_too_small_is_told() -> None:
    report = lint(ROBOT, Normalization("identity", "identity", {}, width=2))
    assert [check.fault for check in report.faults] == ["3 numbers in 2"] * 2


def test_vr_01_values_that_were_normalised_before_are_noticed() -> None:
    generator = np.random.default_rng(4)
    raw = np.stack((generator.normal(40, 12, 200), generator.uniform(-300, 900, 200), generator.normal(2.0, 0.05, 200)), axis=1)
    statistics = statistics_of(raw)
    scored = Normalizer.of("mean_std", statistics, PLAIN)(torch.from_numpy(raw))
    assert looks_normalised(scored, statistics) == [0, 1, 2]
    assert looks_normalised(torch.from_numpy(raw[:50]), statistics) == []
    standard = statistics_of(generator.normal(0, 1, (300, 3)))
    assert looks_normalised(torch.from_numpy(generator.normal(0, 1, (80, 3))), standard) == []


ARM = Feature("joints", "joint", 2, "deg", (-180.0,) * 2, (180.0,) * 2)
DEGREES = Contract("degrees", 10.0, (), (ARM,), (Command(ARM, "position", "absolute", "joints"),))


def degrees() -> np.ndarray:
    generator = np.random.default_rng(6)
    return np.stack((generator.normal(40, 12, 200), generator.uniform(-90, 120, 200)), axis=1)


@pytest.mark.parametrize("mode", ["mean_std", "quantiles", "min_max"])
def test_vr_01_a_robot_that_sends_normalised_states_does_not_load(mode: str) -> None:
    statistics = statistics_of(degrees())
    groups = {"state": {name: statistics[name] for name in NEEDS[mode]}}
    normalization, raw = Normalization(mode, "identity", groups), torch.from_numpy(degrees())
    assert load_policy(Still(), DEGREES, DEGREES, normalization, samples=raw)
    twice = Normalizer.of(mode, statistics, torch.zeros(2, dtype=torch.bool))(raw)
    with pytest.raises(ModelError, match=r"the policy is not loaded\nfeature[^$]*samples: raw +\[0, 1\] looks normalised"):
        load_policy(Still(), DEGREES, DEGREES, normalization, samples=twice)
    with pytest.raises(ModelError, match="samples: at least 20 rows +3 tell nothing"):
        load_policy(Still(), DEGREES, DEGREES, normalization, samples=raw[:3])


@pytest.mark.parametrize("mode", ["mean_std", "quantiles"])
def test_vr_01_statistics_of_data_that_was_normalised_do_not_load(mode: str) -> None:
    """Somebody normalised the data first and took its statistics then: degrees around 0, a deviation of 1."""
    raw = torch.from_numpy(degrees())
    twice = statistics_of(Normalizer.of(mode, statistics_of(degrees()), torch.zeros(2, dtype=torch.bool))(raw).numpy())
    with pytest.raises(ModelError, match=r"action\.joints +statistics of raw data +\[0, 1\] looks normalised already"):
        load_policy(Still(), DEGREES, DEGREES, Normalization("identity", mode, {"action": twice}))
    assert load_policy(Still(), DEGREES, DEGREES, Normalization("identity", mode, {"action": statistics_of(degrees())}))


def test_the_share_of_clipped_values_under_quantiles_is_two_percent() -> None:
    values = np.random.default_rng(5).normal(0, 1, (20_000, 3))
    rate = clip_rate(torch.from_numpy(values), Normalizer.of("quantiles", statistics_of(values), PLAIN))
    torch.testing.assert_close(rate, torch.full((3,), 0.02, dtype=torch.float64), atol=0.002, rtol=0)


def test_vr_27_a_weight_that_is_not_a_number_is_named() -> None:
    weights = {"head.bias": torch.tensor([1.0, float("nan")]), "head.weight": torch.ones(2), "steps": torch.tensor([1])}
    assert not_finite(weights) == ["head.bias"]
    with pytest.raises(ModelError, match="NaN or infinity: head.bias"):
        load_policy(Still(), ROBOT, ROBOT, Normalization("identity", "identity", {}), weights=weights)
