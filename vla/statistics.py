"""Statistics of a policy's training data, from the files that come with checkpoints of lerobot, openpi and OpenVLA.

All become {"state": {...}, "action": {...}} of vectors by name: mean, std, min, max, q01, q99, q10, q90, as many as the file has; and
mask, OpenVLA's: 1 for a number that is normalised, 0 for one that stays as it is (a gripper).
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mmsdk.errors import ModelError, WeightsError
from mmsdk.vision.values import cause

__all__ = ["Statistics", "choose", "masked", "parse_statistics", "read_statistics"]

Statistics = Mapping[str, Float[Tensor, " n"]]
"""Vectors by the name of what they are: one number for every number of a state or an action."""

NAMES = ("mean", "std", "min", "max", "q01", "q99", "q10", "q90")
_GROUPS = {
    "observation.state": "state",
    "proprio": "state",
    "state": "state",
    "action": "action",
    "actions": "action",
}


def read_statistics(path: str | Path, key: str = "") -> dict[str, Statistics]:
    """The statistics in a JSON file. `key` chooses a data set where there are several; see `choose` for the errors.

    Raises WeightsError for a file that cannot be read.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {cause(error)}") from None
    return parse_statistics(tree, key, str(path))


def parse_statistics(tree: object, key: str = "", item: str = "statistics") -> dict[str, Statistics]:
    """The same from JSON that has been read. Raises ModelError where it holds no statistics, or a vector is none."""
    if not isinstance(tree, Mapping):
        raise ModelError(f"{item}: expected an object of statistics, got {type(tree).__name__}")
    inner = tree.get("norm_stats")
    groups = inner if isinstance(inner, Mapping) else tree
    if not _GROUPS.keys() & groups.keys():
        sets = {name: group for name, group in groups.items() if isinstance(group, Mapping) and _GROUPS.keys() & group.keys()}
        groups = choose(sets, key, item)
    elif key:
        raise ModelError(f"{item}: there is one data set, without a key; {key!r} was asked for")
    return {_GROUPS[name]: _vectors(group, f"{item}: {name}") for name, group in groups.items() if name in _GROUPS}


def masked(statistics: Statistics, size: int) -> Bool[Tensor, " m"]:
    """Which of `size` numbers a mask leaves as they are; none where there is no mask."""
    return statistics["mask"] == 0 if "mask" in statistics else torch.zeros(size, dtype=torch.bool)


def choose(sets: Mapping[str, Mapping[str, object]], key: str, item: str) -> Mapping[str, object]:
    """One of several data sets' statistics. Without a key only where there is no choice. Raises ModelError, listing the keys."""
    if key in sets:
        return sets[key]
    if not key and len(sets) == 1:
        return next(iter(sets.values()))
    known = ", ".join(sorted(sets)) or "none"
    told = (
        f"there is no data set {key!r}"
        if key
        else "the statistics are of several data sets, and none was chosen"
        if sets
        else "no statistics"
    )
    raise ModelError(f"{item}: {told}; there is {known}")


def _vectors(group: object, item: str) -> dict[str, Tensor]:
    if not isinstance(group, Mapping):
        raise ModelError(f"{item}: expected vectors by name, got {type(group).__name__}")
    vectors = {}
    for name in NAMES:
        if name in group:
            values = group[name]
            if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
                raise ModelError(f"{item}: {name} is no list of numbers")
            vectors[name] = torch.tensor(values, dtype=torch.float64)
    if "mask" in group:
        mask = group["mask"]
        if not isinstance(mask, list) or not all(isinstance(value, bool) for value in mask):
            raise ModelError(f"{item}: mask is no list of true and false")
        vectors["mask"] = torch.tensor(mask, dtype=torch.float64)
    return vectors
