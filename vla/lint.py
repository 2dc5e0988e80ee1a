"""The linter: what a policy was trained with, held against what it is to be run with, before anything moves.

It proves that statistics cover every feature, are as many as the numbers, are finite and ordered, lie in the declared ranges and agree
with the gripper's polarity, that normalising and back gives the same, and that neither the statistics nor a robot's own states, where some
are given, look normalised already; where it cannot, it refuses with a table. Nothing is passed in silence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import InputError, ModelError
from mmsdk.vla.contract import Contract, Feature
from mmsdk.vla.normalize import NEEDS, Mode, Normalizer, missing
from mmsdk.vla.statistics import Statistics, masked

__all__ = ["Check", "Normalization", "Report", "clip_rate", "lint", "looks_normalised", "not_finite", "plain_columns"]

_ROUND_TRIP = 1e-5
_SLACK = 0.1
_NORMAL = 1.5
_FAR = 7.5
_NEAR = 0.05
_ROWS = 20


@dataclass(frozen=True, slots=True)
class Normalization:
    """How a policy normalises its state and its actions. Features in `plain` stay as they are; `width` is what vectors are padded to."""

    state: Mode
    action: Mode
    statistics: Mapping[str, Statistics]
    plain: frozenset[str] = frozenset()
    eps: float = 1e-8
    width: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.eps < 1 or self.width < 0:
            raise InputError(f"eps {self.eps} is from 0 to below 1, width {self.width} is 0 (none) or a number", item="normalization")

    def mode(self, group: str) -> Mode:
        """The mode of "state" or "action"."""
        return self.state if group == "state" else self.action


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at; `fault` is empty where it holds."""

    feature: str
    rule: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at."""

    checks: tuple[Check, ...] = field(default_factory=tuple)

    @property
    def faults(self) -> tuple[Check, ...]:
        """What does not hold."""
        return tuple(check for check in self.checks if check.fault)

    def __str__(self) -> str:
        rows = [("feature", "rule", ""), *((check.feature, check.rule, check.fault or "ok") for check in self.checks)]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:{widths[0]}}  {rule:{widths[1]}}  {told}".rstrip() for name, rule, told in rows)

    def require(self) -> None:
        """Raise ModelError with the whole table where anything does not hold."""
        if self.faults:
            raise ModelError(f"{len(self.faults)} of {len(self.checks)} checks failed; the policy is not loaded\n{self}")


def lint(contract: Contract, normalization: Normalization, samples: Mapping[str, Float[Tensor, "b n"]] | None = None) -> Report:
    """Hold a policy's normalisation against the contract that it was trained with.

    `samples` are raw rows of "state" and "action" as the policy is to be given them, from a robot that moves.
    """
    known = {feature.name for feature in (*contract.state, *(command.feature for command in contract.action))}
    unknown = sorted(normalization.plain - known)
    checks = [Check("plain", "names of features", f"there is no {', '.join(unknown)}")] if unknown else []
    for group, features in (("state", contract.state), ("action", [command.feature for command in contract.action])):
        if features:
            checks += _group(group, features, normalization)
        if group in (samples or {}):
            checks += _sampled(group, features, normalization, (samples or {})[group])
    return Report(tuple(checks))


def looks_normalised(values: Float[Tensor, "b n"], statistics: Statistics) -> list[int]:
    """The columns of raw values that look as if they had been normalised already, although they are to be normalised yet.

    Such a column stays within [-1.5, 1.5] (or has a mean near 0 and a deviation near 1) where training data was of quite another size or
    place. Telling this from a robot at rest takes some tens of rows from a moving one. Without mean and deviation these are guessed from
    the ends of the data. Raises ModelError where there are none of these either.
    """
    mean, std = _spread(statistics)
    std = std.clamp_min(1e-12)
    seen_mean, seen_std = values.double().mean(0), values.double().std(0, unbiased=False)
    standard = (seen_mean.abs() < 0.5) & (seen_std > 0.3) & (seen_std < 2.0)
    bounded = (values.double().abs() <= _NORMAL).all(0)
    # as far from the training data as normalised values would be, and further than raw ones are
    elsewhere = (
        ((seen_mean - mean).abs() > 3 * std) | (std < 0.25 * seen_std) | (std > 4 * seen_std.clamp_min(1e-12)) & (mean.abs() + std > 3)
    )
    left = masked(statistics, values.shape[1])
    return [int(column) for column in ((standard | bounded) & elsewhere & ~left).nonzero().flatten()]


def clip_rate(values: Float[Tensor, "b n"], normalizer: Normalizer) -> Float[Tensor, " n"]:
    """The share of values of each column that fall outside of [-1, 1] once normalised: some 2 % under quantiles, if the data is alike."""
    return (normalizer(values.double()).abs() > 1 + 1e-6).double().mean(0)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors (weights) that hold NaN or infinity."""
    return sorted(name for name, tensor in tensors.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all()))


def plain_columns(features: Sequence[Feature], plain: frozenset[str]) -> Bool[Tensor, " n"]:
    """Which numbers of these features stay as they are, by their names."""
    return torch.tensor([feature.name in plain for feature in features for _ in range(feature.size)])


def _group(group: str, features: Sequence[Feature], normalization: Normalization) -> list[Check]:
    mode, size = normalization.mode(group), sum(feature.size for feature in features)
    checks = [Check(group, "padded width", f"{size} numbers in {normalization.width}" if 0 < normalization.width < size else "")]
    if mode == "identity":
        return [*checks, Check(group, "statistics: declared identity")]
    statistics = normalization.statistics.get(group, {})
    lacking = missing(mode, statistics)
    told = f"missing or not finite: {', '.join(lacking)}" if lacking else ""
    checks.append(Check(group, f"statistics: {mode} has {', '.join(NEEDS[mode])}", told))
    lengths = {name: vector.shape[0] for name, vector in statistics.items() if vector.shape[0] != size}
    checks.append(Check(group, f"statistics: {size} numbers", "; ".join(f"{name} has {length}" for name, length in lengths.items())))
    if lacking or lengths:
        return checks
    plain = plain_columns(features, normalization.plain)
    mask = {"mask": statistics["mask"]} if "mask" in statistics else {}
    vectors = {name: vector for name, vector in statistics.items() if name != "mask"}
    checks += _ordered(group, vectors)
    start = 0
    for feature in features:
        columns = slice(start, start + feature.size)
        if not bool((plain | masked(mask, size))[columns].all()):
            part = {name: vector[columns] for name, vector in vectors.items()}
            checks += [_ranged(group, feature, part), *_polarity(group, feature, part), _raw(group, feature, part)]
        start += feature.size
    return [*checks, _round_trip(group, Normalizer.of(mode, statistics, plain, normalization.eps, group), vectors)]


def _sampled(group: str, features: Sequence[Feature], normalization: Normalization, rows: Tensor) -> list[Check]:
    """Rows that are still to be normalised look raw."""
    mode, size = normalization.mode(group), sum(feature.size for feature in features)
    statistics = normalization.statistics.get(group, {})
    if mode == "identity" or missing(mode, statistics) or any(vector.shape[0] != size for vector in statistics.values()):
        # statistics that cannot be used are told of above
        return []
    checks = [
        Check(group, f"samples: {size} numbers", "" if rows.shape[1] == size else f"rows of {rows.shape[1]}"),
        Check(group, f"samples: at least {_ROWS} rows", "" if rows.shape[0] >= _ROWS else f"{rows.shape[0]} tell nothing"),
        Check(group, "samples: finite", "" if bool(rows.isfinite().all()) else _where(~rows.isfinite().all(0))),
    ]
    if any(check.fault for check in checks):
        return checks
    plain, columns = plain_columns(features, normalization.plain), looks_normalised(rows, statistics)
    wrong = torch.zeros(size, dtype=torch.bool)
    wrong[columns] = True
    told = _where(wrong & ~plain)
    return [*checks, Check(group, "samples: raw", f"{told} looks normalised: it would be done twice" if told else "")]


def _raw(group: str, feature: Feature, part: Statistics) -> Check:
    """Statistics of raw data: those of normalised data are mean 0 and deviation 1, or ends at -1 and 1, wherever the range is."""
    low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (feature.low, feature.high))
    # of a range that is itself near 1 (radians, metres, fractions) the two cannot be told apart; neither of none
    far = (torch.maximum(low.abs(), high.abs()).minimum(high - low) > _FAR) & (high - low).isfinite()
    normal = torch.zeros(feature.size, dtype=torch.bool)
    for pair, wanted in ((("mean", "std"), (0, 1)), (("min", "max"), (-1, 1)), (("q01", "q99"), (-1, 1)), (("q10", "q90"), (-1, 1))):
        if all(name in part for name in pair):
            normal |= (part[pair[0]] - wanted[0]).abs().maximum((part[pair[1]] - wanted[1]).abs()) < _NEAR
    told = _where(normal & far)
    return Check(f"{group}.{feature.name}", "statistics of raw data", f"{told} looks normalised already" if told else "")


def _spread(statistics: Statistics) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Mean and deviation; guessed from the ends of the data where these are all there is."""
    if "mean" in statistics and "std" in statistics:
        return statistics["mean"].double(), statistics["std"].double()
    for low, high in (("q01", "q99"), ("min", "max"), ("q10", "q90")):
        if low in statistics and high in statistics:
            first, last = statistics[low].double(), statistics[high].double()
            # a quarter of the way from end to end: between that of even and of normal data
            return (first + last) / 2, (last - first) / 4
    raise ModelError(f"statistics of {', '.join(statistics) or 'nothing'} do not tell where the data lies; mean and std, or two ends, do")


def _ordered(group: str, statistics: Statistics) -> list[Check]:
    checks = [Check(group, "std is not negative", _where(statistics["std"] < 0))] if "std" in statistics else []
    for low, high in (("min", "max"), ("q01", "q99"), ("q10", "q90")):
        if low in statistics and high in statistics:
            checks.append(Check(group, f"{low} <= {high}", _where(statistics[low] > statistics[high])))
    return checks


def _ranged(group: str, feature: Feature, part: Statistics) -> Check:
    """Degrees for radians, millimetres for metres, positions for steps: data far outside of what is declared."""
    low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (feature.low, feature.high))
    slack = torch.where((high - low).isfinite(), _SLACK * (high - low), torch.zeros_like(low))
    places = {name: _where((vector < low - slack) | (vector > high + slack)) for name, vector in part.items() if name != "std"}
    told = ", ".join(f"{name}{place}" for name, place in places.items() if place)
    return Check(f"{group}.{feature.name}", f"data within {feature.low[0]:g}..{feature.high[0]:g} {feature.unit}", told)


def _polarity(group: str, feature: Feature, part: Statistics) -> list[Check]:
    """A gripper's data reaches from opened to closed: with [0, 1] declared and [-1, 1] in the data, one of the two is wrong."""
    names = next((pair for pair in (("min", "max"), ("q01", "q99")) if all(name in part for name in pair)), None)
    if feature.kind != "gripper" or names is None:
        return []
    ends = sorted(end for end in (feature.opened, feature.closed) if end is not None)
    seen = float(part[names[0]].min()), float(part[names[1]].max())
    off = max(abs(seen[0] - ends[0]), abs(seen[1] - ends[1])) > 0.25 * (ends[1] - ends[0])
    told = f"the data reaches from {seen[0]:g} to {seen[1]:g}" if off else ""
    return [Check(f"{group}.{feature.name}", f"gripper from {feature.opened:g} (opened) to {feature.closed:g} (closed)", told)]


def _round_trip(group: str, normalizer: Normalizer, statistics: Statistics) -> Check:
    known = torch.stack([vector for name, vector in statistics.items() if name != "std"]).float()
    back = normalizer.inverse(normalizer(known))
    size = known.abs().clamp_min(1.0)
    # NaN fails this comparison, as it should; what is not finite itself is none of the mode's
    good = ((back - known).abs() / size <= _ROUND_TRIP) | ~known.isfinite()
    return Check(group, "back from normalised", _where(~good.all(0)))


def _where(wrong: Tensor) -> str:
    return f"[{', '.join(str(int(column)) for column in wrong.nonzero().flatten())}]" if bool(wrong.any()) else ""
