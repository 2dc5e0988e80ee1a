"""What the methods of compression were to reach on mini, beside what the rows of the bench say: met or not, each with its numbers.

The aims are the papers' own figures on their own models, taken as bars for a far smaller one; where a paper says no number, the aim is
ours and says so. An aim for answers is met or missed where its bar lies outside the 95 % interval of what was reached; inside it, so few
questions cannot tell.
"""

from collections.abc import Callable, Iterator, Sequence

from mmsdk.apps.console import Cell
from mmsdk.apps.intervals import matched_ratio, ratio

__all__ = ["aims"]

Row = dict[str, Cell]
_TRAINED = ("dora", "dora-adaptive", "braco-trained")
_BATCH, _SAVED, _SPEED, _LIGHTER = 4, 0.05, 2.8, 0.38


def aims(rows: Sequence[Row]) -> list[Row]:
    """Rows {aim, wanted, reached, met} of all aims that these `completed` rows can be held to."""
    judged = [judge(rows) for judge in (_clusters, _best, _deft, _dora, _braco, _choosing, _whole)]
    return [aim for found in judged for aim in found]


def _clusters(rows: Sequence[Row]) -> Iterator[Row]:
    for share, wanted in ((0.1, 0.98), (0.01, 0.88)):
        yield from _kept(rows, "simplecluster", "clip", share, wanted)


def _best(rows: Sequence[Row]) -> Iterator[Row]:
    """Whether simplecluster is ahead of every other method that needs no training, at one token in a hundred of a clip.

    Of those that work in front of the language model, which are all that its paper has, the best is told as well.
    """
    mine, others = _at(rows, "simplecluster", "clip", 0.01), _untrained(rows, "clip", 0.01)
    rivals = [row for row in others if row["method"] != "simplecluster"]
    if mine and rivals:
        best = max(rivals, key=lambda row: _number(row["accuracy"]))
        told = f"{_percent(mine)}; the best other, {best['method']}: {_percent(best)}"
        front = [row for row in rivals if row["stage"] != "decoder"]
        if front and best not in front:
            second = max(front, key=lambda row: _number(row["accuracy"]))
            told += f"; in front of the language model, {second['method']}: {_percent(second)}"
        yield _aim("simplecluster ahead of every untrained method, clips at 1 %", "first", told, _verdict(_beside(mine, best), 1.0))


def _deft(rows: Sequence[Row]) -> Iterator[Row]:
    for media in ("image", "clip"):
        for share, wanted in ((0.2, 0.948), (0.1, 0.907)):
            yield from _kept(rows, "deft", media, share, wanted)


def _dora(rows: Sequence[Row]) -> Iterator[Row]:
    """Operations, answers and speed of the actor by itself, on pictures; speed is of runs in turn with the whole encoder."""
    for row in _of(rows, "dora-adaptive", "image"):
        lighter, full = 1 - _number(row["encoder_flops"]), _number(row["accuracy_full"])
        least, most = (100 * full * (1 - kept) for kept in reversed(_interval(row)))
        lost = 100 * (full - _number(row["accuracy"]))
        told = f"{100 * lighter:.1f} % less, {lost:.1f} points lost ({least:.1f} to {most:.1f}; {_counted(row)})"
        wanted = f"{100 * _LIGHTER:.0f} % less, at most 1 point lost"
        met = _verdict(_interval(row), 1 - 0.01 / max(full, 1e-9)) if lighter >= _LIGHTER else "no"
        yield _aim("dora, operations of the encoder on pictures", wanted, told, met)
    turns = {row["method"]: _number(row["encode_ms"]) for row in rows if row["media"] == "image, in turn"}
    if "dora-adaptive" in turns:
        faster = turns["identity"] / turns["dora-adaptive"]
        yield _aim("dora, pictures a second through the encoder", "more", f"{faster:.2f} times the whole encoder's", _yes(faster > 1))


def _braco(rows: Sequence[Row]) -> Iterator[Row]:
    for row in _of(rows, "braco-trained", "image"):
        yield _share(row, f"braco, trained, {1 / _number(row['retention']):.0f}x on pictures", 0.95)
    for row in _of(rows, "braco-trained", "clip"):
        rivals = _untrained(rows, "clip", 0.01)
        if rivals:
            best = max(rivals, key=lambda other: _number(other["accuracy"]))
            told = f"{_percent(row)}; the best untrained at 100x, {best['method']}: {_percent(best)}"
            name = f"braco, trained, {1 / _number(row['retention']):.0f}x on clips"
            yield _aim(name, "no less than any untrained one (ours)", told, _verdict(_beside(row, best), 1.0))


def _choosing(rows: Sequence[Row]) -> Iterator[Row]:
    """What choosing takes of the prefill that it saves, of every method at a tenth of the tokens."""
    shares = {f"{row['method']} on {row['media']}s": one for row in _methods(rows) if (one := _selection(rows, row)) is not None}
    if shares:
        worst, within = max(shares, key=lambda name: shares[name]), sum(share < _SAVED for share in shares.values())
        told = f"{within} of {len(shares)}; most takes {worst}, {100 * shares[worst]:.1f} %"
        yield _aim("choosing beside the prefill that it saves, at 10 %", f"under {100 * _SAVED:g} %", told, _yes(within == len(shares)))


def _whole(rows: Sequence[Row]) -> Iterator[Row]:
    """Clips from pixels to the end of an answer."""
    ends = [row for row in rows if str(row["media"]).startswith("clip of") and row["method"] != "identity"]
    if ends:
        best = max(ends, key=lambda row: _number(row["speedup"]))
        told = f"{_number(best['speedup']):.2f} times by {best['method']}"
        yield _aim(f"{best['media']} at 10 %, pixels to answer", f"{_SPEED} times", told, _yes(_number(best["speedup"]) >= _SPEED))


def _kept(rows: Sequence[Row], method: str, media: str, share: float, wanted: float) -> Iterator[Row]:
    row = _at(rows, method, media, share)
    if row:
        yield _share(row, f"{method}, {media}s at {100 * share:g} %", wanted)


def _share(row: Row, name: str, wanted: float) -> Row:
    low, high = _interval(row)
    told = f"{_percent(row)} ({100 * low:.0f} to {100 * high:.0f} %; {_counted(row)})"
    return _aim(name, f"{100 * wanted:.3g} % of full", told, _verdict((low, high), wanted))


def _aim(name: str, wanted: str, reached: str, met: str) -> Row:
    return {"aim": name, "wanted": wanted, "reached": reached, "met": met}


def _yes(met: bool) -> str:
    return "yes" if met else "no"


def _verdict(interval: tuple[float, float], bar: float) -> str:
    low, high = interval
    if low >= bar:
        return "yes"
    return "no" if high < bar else "cannot tell"


def _of(rows: Sequence[Row], method: str, media: str) -> list[Row]:
    return [row for row in rows if (row["method"], row["media"], row["batch"]) == (method, media, _BATCH) and row["accuracy"] is not None]


def _at(rows: Sequence[Row], method: str, media: str, share: float) -> Row | None:
    return next((row for row in _of(rows, method, media) if row["retention"] == share), None)


def _methods(rows: Sequence[Row], kept: Callable[[Row], bool] = lambda row: row["retention"] == 0.1) -> list[Row]:
    """Rows of batches of single methods, chains and the uncompressed model left out."""
    plain = [row for row in rows if row["batch"] == _BATCH and row["accuracy"] is not None and " + " not in str(row["method"])]
    return [row for row in plain if row["method"] != "identity" and kept(row)]


def _untrained(rows: Sequence[Row], media: str, share: float) -> list[Row]:
    return [row for row in _methods(rows, lambda row: (row["media"], row["retention"]) == (media, share)) if row["method"] not in _TRAINED]


def _selection(rows: Sequence[Row], row: Row) -> float | None:
    """Choosing as a share of the prefill that is saved; None inside the encoder, where methods choose while it runs.

    What is chosen inside the decoder takes its time within the prefill.
    """
    if str(row["stage"]).startswith("encoder"):
        return None
    (whole,) = _of(rows, "identity", str(row["media"]))
    inside = _number(row["choose_ms"]) - _number(row["compress_ms"])
    saved = _number(whole["prefill_ms"]) - _number(row["prefill_ms"]) + inside
    return _number(row["choose_ms"]) / saved if saved > 0 else float("inf")


def _right(row: Row) -> int:
    return round(_number(row["accuracy"]) * _number(row["n"]))


def _part(row: Row) -> float:
    return _number(row["accuracy"]) / max(_number(row["accuracy_full"]), 1e-9)


def _percent(row: Row) -> str:
    return f"{100 * _part(row):.0f} % of full"


def _interval(row: Row) -> tuple[float, float]:
    """Of the share of the uncompressed model's right answers, by the questions that one of the two alone answers."""
    worse, better = round(_number(row["worse"])), round(_number(row["better"]))
    return matched_ratio(_full(row) - worse, worse, better)


def _beside(row: Row, other: Row) -> tuple[float, float]:
    """The interval of how many times as much a row answers as another; which of the questions each answers no row tells of the other."""
    return ratio(_right(row), _right(other), round(_number(row["n"])))


def _full(row: Row) -> int:
    return round(_number(row["accuracy_full"]) * _number(row["n"]))


def _counted(row: Row) -> str:
    return f"{_right(row)} right of {row['n']}, uncompressed {_full(row)}"


def _number(cell: Cell) -> float:
    assert isinstance(cell, int | float), "rows without numbers were left out"
    return float(cell)
