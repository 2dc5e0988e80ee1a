"""How long this machine takes to read a prompt, by its length: measured once, kept in the user's cache folder.

    latency = latency_of(vlm, memory)   # a few seconds with a progress bar, the first time only
    latency(300)                        # milliseconds of a prefill of 300 tokens into such a memory

What is kept is told by machine, model, number format, thread count and kind of memory (`kv`): writing into blocks, rounding and choosing
what stays take time of their own. Under another of these it is measured again. Deleting `<cache>/latency` forgets all of it.
"""

import copy
import hashlib
import json
import math
import os
import platform
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from mmsdk.cache import cache_folder
from mmsdk.decoder.prefill import Laid, capacities, prefill_into
from mmsdk.decoder.spans import Span
from mmsdk.errors import ModelError, WeightsError
from mmsdk.kv.memory import DenseMemory, Memory, Shape
from mmsdk.models.types import VLM
from mmsdk.vision.types import VisualTokens
from mmsdk.vision.values import cause
from mmsdk.weights.cache import locked

__all__ = ["Latency", "latency_file", "latency_of", "measure"]

# Prompts of these lengths are timed as long as seconds are left: more of them on a faster machine.
LENGTHS = (8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SECONDS = 5.0
RUNS = 3
# Space in the cache for an answer, as in an ordinary call.
ROOM = 128
_DENSE = DenseMemory()


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of prefill at rising `lengths` of the prompt in tokens; `ms` never falls.

    Raises ModelError where the two do not fit together.
    """

    lengths: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = len(self.lengths) > 1 and all(a < b for a, b in zip((0, *self.lengths), self.lengths, strict=False))
        timed = len(self.ms) == len(self.lengths) and all(
            0 < a <= b < math.inf for a, b in zip(self.ms, (*self.ms[1:], self.ms[-1]), strict=True)
        )
        if not rising or not timed:
            raise ModelError(f"no latency model: lengths {self.lengths} must rise and times {self.ms} be positive and never fall")

    def __call__(self, length: int) -> float:
        """Straight between two measured lengths; below the first as much as there.

        Beyond the last it goes on as a power of the length, with the exponent of the last two, held between 1 (all tokens cost the same)
        and 2 (each attends to all before it).
        """
        last, before = self.lengths[-1], self.lengths[-2]
        if length <= last:
            return float(np.interp(length, self.lengths, self.ms))
        exponent = math.log(self.ms[-1] / self.ms[-2]) / math.log(last / before)
        return float(self.ms[-1] * (length / last) ** min(2.0, max(1.0, exponent)))


def latency_of(vlm: VLM, memory: Memory = _DENSE) -> Latency:
    """The latency model of this machine for a model and a kind of memory: what is kept of it, else measured now and kept.

    Of several processes that want it at the same time one measures, and the others wait. Raises WeightsError where the cache folder
    cannot be written.
    """
    file, key = latency_file(vlm, memory), _key(vlm, memory)
    kept = _kept(file, key)
    if kept is not None:
        return kept
    with locked(file.with_suffix("")):
        kept = _kept(file, key)
        if kept is not None:
            return kept
        latency = measure(vlm, memory)
        _keep(latency, file, key)
        return latency


def latency_file(vlm: VLM, memory: Memory = _DENSE) -> Path:
    """Where the latency model of a model and a kind of memory on this machine is kept; not created here."""
    digest = hashlib.sha256(json.dumps(_key(vlm, memory), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "latency" / f"{digest[:32]}.json"


def measure(vlm: VLM, memory: Memory = _DENSE) -> Latency:
    """Time the projector and the decoder on prompts of noise: at each length one run to warm up, then the median of three.

    Longer prompts are left out once they would take more than some seconds. What they fill is a memory of the same kind, and no other. The
    progress bar goes to stderr, and only to a terminal.
    """
    # a copy of a memory recalls nothing, and nothing of this is to be recalled
    memory, began, found = copy.deepcopy(memory), time.perf_counter(), dict[int, float]()
    lengths = [length for length in LENGTHS if length <= max(vlm.context, LENGTHS[1])]
    with tqdm(total=len(lengths), desc="measuring this machine, once", unit="length", disable=None) as bar:
        for length in lengths:
            # a prompt of twice the length takes a little more than twice as long
            due = (1 + RUNS) * 2.2 * found[max(found)] / 1000 if found else 0.0
            if len(found) > 1 and time.perf_counter() - began + due > SECONDS:
                break
            tokens = _noise(vlm, length)
            times = [_timed(vlm, memory, tokens) for _ in range(1 + RUNS)]
            found[length] = statistics.median(times[1:])
            bar.update()
    # a short prompt that was disturbed while it was timed must not seem slower than a long one
    return Latency(tuple(found), tuple(accumulate(found.values(), max)))


def _timed(vlm: VLM, memory: Memory, tokens: VisualTokens) -> float:
    """Milliseconds from visual tokens to the decoder's last hidden state, as the prefill stage has them."""
    device, config = tokens.features.device, vlm.decoder.config
    _synchronised(device)
    started = time.perf_counter()
    with torch.no_grad():
        (embeddings,) = vlm.connect([tokens])
        row = Laid(embeddings, torch.arange(len(embeddings)), (Span(-1, (len(embeddings),)),))
        shape = Shape(config.layers, config.kv_heads, config.entry, embeddings.dtype, embeddings.device, config.levels)
        cache, _ = memory.begin(shape, capacities(vlm.decoder, [row], (), ROOM), [()], room=ROOM)
        prefill_into(vlm.decoder, [row], (), cache, memory.chunk, last=1)
        memory.learn(cache, [()])
    _synchronised(device)
    return 1000 * (time.perf_counter() - started)


def _synchronised(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _noise(vlm: VLM, length: int) -> VisualTokens:
    """One row of visual tokens that show nothing."""
    weight = next(vlm.decoder.parameters())
    features = torch.randn(length, vlm.encoder.width, generator=torch.Generator().manual_seed(0))
    positions = torch.zeros(length, 3, dtype=torch.int64)
    positions[:, 2] = torch.arange(length)
    here = weight.device
    return VisualTokens(
        features.to(here, weight.dtype), positions.to(here), torch.ones(length, device=here), (1, 1, length), torch.zeros(1, device=here),
        torch.empty(0, device=here),
    )  # fmt: skip


def _key(vlm: VLM, memory: Memory) -> dict[str, str | int]:
    """Everything that the times depend on and that can be told without measuring."""
    weights = list(vlm.decoder.parameters())
    device = weights[0].device
    return {
        "machine": platform.node(),
        "processor": _processor() if device.type != "cuda" else torch.cuda.get_device_name(device),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "torch": str(torch.__version__),
        "model": vlm.name,
        "shape": repr(vlm.decoder.config),
        "bytes": sum(weight.numel() * weight.element_size() for weight in (*weights, *vlm.decoder.buffers())),
        "dtype": str(weights[0].dtype),
        "memory": repr(memory),
    }


def _processor() -> str:
    """The processor's own name where the system tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8", errors="replace").splitlines() if told.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _keep(latency: Latency, file: Path, key: dict[str, str | int]) -> None:
    """Write it whole or not at all."""
    staged = file.with_suffix(".new")
    try:
        staged.write_text(json.dumps({"key": key, "lengths": latency.lengths, "ms": latency.ms}, indent=1), encoding="utf-8")
        os.replace(staged, file)
    except OSError as error:
        raise WeightsError(f"cannot keep what was measured in {file}: {cause(error)}; free some space or set MMSDK_CACHE") from error


def _kept(file: Path, key: dict[str, str | int]) -> Latency | None:
    """What the file holds for this key; none where it is not there or is damaged, since measuring again mends that."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        if told["key"] != key:
            return None
        return Latency(tuple(map(int, told["lengths"])), tuple(map(float, told["ms"])))
    except (OSError, ValueError, TypeError, KeyError, ModelError):
        return None
