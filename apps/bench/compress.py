"""Compression on mini: every method at every retention, on held-out pictures and clips: answers, time of each stage, bytes, fidelity."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from mmsdk import plugins
from mmsdk.answer import Timings
from mmsdk.apps.console import Cell
from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.features import Sample, draw, media_of
from mmsdk.apps.train_mini.scenes import Artist, Scene
from mmsdk.apps.train_mini.wording import QA
from mmsdk.compress import METHODS, Compression, compression, named
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.types import KVCache
from mmsdk.models.mini.family import Mini, load
from mmsdk.stages import Clock, Prepared, prepare
from mmsdk.tokencomp.fidelity import fidelity
from mmsdk.tokencomp.types import Compressor, Thinner
from mmsdk.vision.types import Media, VisualTokens
from mmsdk.weights import pull

__all__ = ["Compress"]

RETENTIONS = (0.5, 0.25, 0.1, 0.05, 0.01)
_TYPES = {"image": ("object", "colour", "place", "relation", "yes/no"), "clip": ("direction", "order", "object", "yes/no")}
_SEED = 1_000_011


@dataclass(frozen=True, slots=True)
class _Asked:
    media: Media
    qa: QA


@dataclass(frozen=True, slots=True)
class _Run:
    """What a set of questions gave: right answers, medians over batches in ms, bytes of the cache after prefill per question."""

    right: int
    timings: Timings
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class Compress:
    """Short questions with one right answer, answered greedily through the pipeline's own stages, at batch 4 and at batch 1.

    `methods` is all of them, or names joined by "+"; every retention runs after the full model on the same questions. A method whose
    needs an input does not meet (frames, for the methods of clips) is left out for that input, and that is said.
    """

    images: int = 64
    clips: int = 24
    single: int = 12
    methods: str = "all"
    seed: int = _SEED

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {method, stage, media, retention, batch, n, accuracy, accuracy_full, encode_ms, compress_ms, prefill_ms, decode_ms,
        kv_bytes, nqe, coverage}; milliseconds are those of one batch, bytes those of one question, the last two None inside a model."""
        vlm = load("mini", None, torch.bfloat16, torch.device("cpu"))
        names = plugins.available(METHODS) if self.methods == "all" else self.methods.split("+")
        rows: list[dict[str, Cell]] = []
        with tqdm(total=2 * 2 * (1 + (len(names) - 1) * len(RETENTIONS)), desc="compress", unit="run", mininterval=2) as bar:
            for kind, asked in self._asked().items():
                tokens = [item for one in asked for item in vlm.encoder([one.media])]
                for batch, questions in ((4, asked), (1, asked[: self.single])):
                    _run(vlm, Compression(), questions[:batch], batch)  # memory is touched and threads are awake
                    full = _run(vlm, Compression(), questions, batch)
                    for name, share in _plan(names):
                        spec = compression("identity" if share == 1.0 else f"{name}:{share}")
                        found = full if share == 1.0 else _tried(vlm, spec, questions, batch)
                        bar.update()
                        if found is not None:
                            loss = _fidelity(vlm, spec, tokens[: len(questions)])
                            rows.append(_row(name, spec, kind, share, batch, len(questions), found, full, loss))
        return rows

    def _asked(self) -> dict[str, list[_Asked]]:
        """A question each about held-out pictures and clips, the types in turn."""
        artist = Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
        return {
            "image": _questions(draw(artist, self.seed, 4 * self.images, 0, 0), "image", self.images),
            "clip": _questions(draw(artist, self.seed, 0, 0, 4 * self.clips), "clip", self.clips),
        }


def _questions(items: Iterator[Scene | Clip], kind: str, most: int) -> list[_Asked]:
    """Pictures that cannot be asked what is due are passed over."""
    found: list[_Asked] = []
    for number, item in enumerate(items):
        sample = Sample(None, item) if isinstance(item, Clip) else Sample(item, None)
        due = _TYPES[kind][len(found) % len(_TYPES[kind])]
        fitting = [qa for qa in sample.questions(np.random.default_rng((_SEED, number))) if qa.type == due]
        if fitting and len(found) < most:
            found.append(_Asked(media_of(item), fitting[0]))
    return found


def _plan(names: Sequence[str]) -> Iterator[tuple[str, float]]:
    yield "identity", 1.0
    yield from ((name, share) for name in names if name != "identity" for share in RETENTIONS)


def _tried(vlm: Mini, spec: Compression, asked: Sequence[_Asked], batch: int) -> _Run | None:
    """None, with the reason on the screen, where the method is not made for such inputs."""
    try:
        return _run(vlm, spec, asked, batch)
    except InputError as error:
        tqdm.write(f"{named(spec.steps[0].method)} left out: {error}")
        return None


def _run(vlm: Mini, spec: Compression, asked: Sequence[_Asked], batch: int) -> _Run:
    right, times, held = 0, [], 0
    for start in range(0, len(asked), batch):
        some = asked[start : start + batch]
        clock = Clock(torch.device("cpu"))
        ready = prepare(vlm, spec, [(one.media, one.qa.question) for one in some], 16, clock)
        for error in ready.errors.values():
            raise error
        held += _bytes(ready.context.cache if ready.context else None, vlm.decoder.config.layers)
        with clock.stage("decode"):
            said = _said(vlm, ready)
        right += sum(text.strip() == one.qa.answer for text, one in zip(said, some, strict=True))
        times.append(clock.timings)
    return _Run(right, _median(times), held / len(asked))


def _said(vlm: Mini, ready: Prepared) -> list[str]:
    assert ready.context is not None, "no row failed"
    configs = [GenerationConfig(max_tokens=16)] * len(ready.rows)
    steps = generate(vlm.decoder, ready.context.hidden, ready.context.cache, configs, vlm.tokenizer.decode, vlm.stop_ids)
    return [row.text for row in collect(steps, len(configs))]


def _bytes(cache: KVCache | None, layers: int) -> int:
    """Keys and values of true entries, padding left out."""
    if cache is None:
        return 0
    views = [cache.view(layer) for layer in range(layers)]
    return sum(2 * int(v.lengths.sum()) * v.keys.shape[1] * v.keys.shape[3] * v.keys.element_size() for v in views)


def _median(times: Sequence[Timings]) -> Timings:
    return Timings(**{stage: statistics.median(asdict(t)[stage] for t in times) for stage in asdict(times[0])})


def _fidelity(vlm: Mini, spec: Compression, tokens: Sequence[VisualTokens]) -> tuple[float, float] | None:
    """Mean error and coverage of a step between encoder and decoder, in the space that it works in; none where it works inside either.

    A method that asks is not told a question here.
    """
    if not all(isinstance(step.method, Compressor) and not isinstance(step.method, Thinner) for step in spec.steps):
        return None
    between = tokens
    if spec.behind.steps:
        embedded = zip(tokens, vlm.connect(tokens), strict=True)
        between = [replace(item, features=features) for item, features in embedded]
    found = [fidelity(full, short) for full, short in zip(between, spec(between), strict=True)]
    return statistics.mean(f.nqe for f in found), statistics.mean(f.coverage for f in found)


def _row(
    name: str, spec: Compression, media: str, share: float, batch: int, n: int, run: _Run, full: _Run, loss: tuple[float, float] | None
) -> dict[str, Cell]:
    stage = "encoder" if spec.inside_encoder else "decoder" if spec.inside_decoder else "projector"
    took = run.timings
    return {
        "method": name, "stage": stage, "media": media, "retention": share, "batch": batch, "n": n, "accuracy": run.right / n,
        "accuracy_full": full.right / n, "encode_ms": took.encode, "compress_ms": took.compress, "prefill_ms": took.prefill,
        "decode_ms": took.decode, "kv_bytes": run.kv_bytes, "nqe": loss[0] if loss else None, "coverage": loss[1] if loss else None,
    }  # fmt: skip
