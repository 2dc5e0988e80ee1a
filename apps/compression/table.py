"""The table of compression: a row for each method, medium, budget and batch, and for clips that go from pixels to answers."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from tqdm import tqdm

from mmsdk.apps.compression.answers import right
from mmsdk.apps.compression.asked import Asked
from mmsdk.apps.compression.costs import Cost, cost, lost, paired, run
from mmsdk.apps.compression.lengths import encoder_flops
from mmsdk.apps.console import Cell
from mmsdk.compress import PROPORTIONAL, Compression, compression
from mmsdk.errors import InputError, ModelError
from mmsdk.models.types import VLM
from mmsdk.stages import Question
from mmsdk.tokencomp.coder import read_coder

__all__ = ["CHAINS", "RETENTIONS", "completed", "end_rows", "method_rows", "stage_of"]

RETENTIONS = (0.5, 0.25, 0.1, 0.05, 0.01)
# Beside these: what a paper tells its figures at.
_MORE: Mapping[str, tuple[float, ...]] = MappingProxyType({"deft": (0.2,)})
# What the first of two methods leaves inside the encoder; the other, behind it, leaves what is asked for of all tokens.
CHAINS: Mapping[str, float] = MappingProxyType({"tome + simplecluster": 0.5, "dora + simplecluster": 0.4, "tome + deft": 0.5})

_BATCHES = (4, 1)
_STAGES = ("encode", "compress", "prefill", "decode")
_TOGETHER, _COMPARED, _SAID = 4, 12, 16
# Of a row before it is completed: a digit for each question, 1 where it was answered rightly.
_ANSWERS = "answers"


def method_rows(vlm: VLM, name: str, media: str, asked: Sequence[Asked], tokens: int, repeats: int) -> Iterator[dict[str, Cell]]:
    """The rows of one method on pictures or on clips; what it is not made for is left out, with the reason on the screen.

    `name` is "identity", a method, one of `CHAINS`, "dora-adaptive", which finds its own budget, "braco-trained", at what its coder was
    trained for, or any of these but the first with " + proportional" behind it.
    """
    base, more = name.removesuffix(f" + {PROPORTIONAL}"), [PROPORTIONAL] * name.endswith(f" + {PROPORTIONAL}")
    for share, steps in _specs(base, media):
        spec, pixels = compression([*steps, *more]), name == "identity"
        try:
            answers = right(vlm, spec, asked, _TOGETHER)
            costs = {batch: cost(vlm, spec, asked[:batch], tokens, repeats, pixels) for batch in _BATCHES}
        except (InputError, ModelError) as error:
            tqdm.write(f"{' + '.join(steps)} left out for {media}s: {error}", file=sys.stderr)
            continue
        loss = lost(vlm, spec, asked[:_COMPARED])
        # what finds its own amount is lighter for one input than for another
        work = encoder_flops(vlm, spec, [one.media for one in (asked[:_TOGETHER] if share else asked)])
        for batch, one in costs.items():
            yield _row(name, spec, media, share or one.kept, batch, answers, one, work, loss)


def end_rows(vlm: VLM, plans: Sequence[Sequence[str]], items: Sequence[Question], media: str, pairs: int) -> Iterator[dict[str, Cell]]:
    """A row for no compression and one for each plan, a list of steps, from the pixels of a batch to 16 tokens said.

    Every plan runs once beforehand, for nothing; those that the inputs are too small for are left out.
    """
    specs = {"identity": Compression()} | {" + ".join(map(_told, plan)): compression(list(plan)) for plan in plans}
    for name, spec in list(specs.items()):
        try:
            run(vlm, spec, items, _SAID)
        except (InputError, ModelError) as error:
            tqdm.write(f"{name} left out for a {media}: {error}", file=sys.stderr)
            del specs[name]
    for (name, spec), (one, speedup) in zip(specs.items(), paired(vlm, list(specs.values()), items, _SAID, pairs), strict=True):
        yield _row(name, spec, media, one.kept, len(items), pairs, one, None, None, speedup)


def completed(rows: Sequence[dict[str, Cell]]) -> list[dict[str, Cell]]:
    """Rows beside the uncompressed model's of the same medium and batch: its accuracy, which of its answers changed, how many times its
    time, and, for methods that leave the encoder alone, its encoder's time."""
    whole = {(one["media"], one["batch"]): one for one in rows if one["method"] == "identity"}
    return [_beside(one, whole[one["media"], one["batch"]]) for one in rows]


def stage_of(spec: Compression) -> str:
    """Where the steps work, from the encoder on; no step at all counts to the projector."""
    inside, within = len(spec.inside_encoder), len(spec.inside_decoder)
    parts = (("encoder", inside), ("projector", len(spec.steps) - inside - within), ("decoder", within))
    return "+".join(name for name, steps in parts if steps) or "projector"


def _specs(name: str, media: str) -> list[tuple[float | None, list[str]]]:
    """What a name stands for: the share of tokens that is asked for, where one is, and the steps by which it is asked for."""
    if name == "identity":
        return [(1.0, [name])]
    if name == "dora-adaptive":
        return [(None, ["dora"])]
    if name == "braco-trained":
        counts = sorted((count for kind, count in read_coder("mini", torch.device("cpu")).sets if kind == media), reverse=True)
        return [(None, [f"braco:{count},coder=mini"]) for count in counts]
    if name in CHAINS:
        (inner, outer), first = name.split(" + "), CHAINS[name]
        return [(share, [f"{inner}:{first}", f"{outer}:{share / first:g}"]) for share in RETENTIONS if share < first]
    return [(share, [f"{name}:{share}"]) for share in sorted((*RETENTIONS, *_MORE.get(name, ())), reverse=True)]


def _told(step: str) -> str:
    """A step without its amount, or how it comes to one."""
    name, said, _ = step.partition(":")
    return name if said else f"{name}-adaptive"


def _row(
    name: str, spec: Compression, media: str, share: float, batch: int, found: Sequence[bool] | int, cost: Cost,
    work: float | None, lost: tuple[float, float] | None, speedup: float | None = None,
) -> dict[str, Cell]:  # fmt: skip
    """A row before it is `completed`. `found` says of every question that was asked whether it was answered rightly, or how many pairs
    were timed."""
    took = cost.timings
    n, accuracy = (found, None) if isinstance(found, int) else (len(found), sum(found) / len(found))
    return {
        "method": name, "stage": stage_of(spec), "media": media, "retention": share, "batch": batch, "n": n, "accuracy": accuracy,
        "accuracy_full": None, "encode_ms": took.encode, "compress_ms": took.compress, "prefill_ms": took.prefill,
        "decode_ms": took.decode, "kv_bytes": cost.kv_bytes, "nqe": lost[0] if lost else None, "coverage": lost[1] if lost else None,
        "speedup": speedup, "choose_ms": cost.choosing, "encoder_flops": work,
        _ANSWERS: "" if isinstance(found, int) else "".join(str(int(one)) for one in found),
    }  # fmt: skip


def _beside(told: dict[str, Cell], whole: dict[str, Cell]) -> dict[str, Cell]:
    pairs = Counter(zip(str(whole[_ANSWERS]), str(told[_ANSWERS]), strict=True) if told["accuracy"] is not None else ())
    one = {key: cell for key, cell in told.items() if key != _ANSWERS} | {"worse": pairs["1", "0"], "better": pairs["0", "1"]}
    if one["speedup"] is not None:
        # paired, and from pixels on
        return one | {"worse": None, "better": None}
    encode = one["encode_ms"] if str(one["stage"]).startswith("encoder") else whole["encode_ms"]
    filled = one | {"accuracy_full": whole["accuracy"], "encode_ms": encode}
    return filled | {"speedup": _total(whole) / _total(filled)}


def _total(one: dict[str, Cell]) -> float:
    return sum(float(value) for stage in _STAGES if isinstance(value := one[f"{stage}_ms"], int | float))
