"""Three levels of memory: a small DeepSeek-V4 reads a million tokens; what each level then holds, there and in the published sizes."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from mmsdk.apps.console import Cell, busy
from mmsdk.decoder.deepseek_v4 import DeepseekV4Decoder
from mmsdk.decoder.deepseek_v4_config import DeepseekV4Config
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.rope import Unscaled
from mmsdk.errors import InputError
from mmsdk.kv.three_level import Plan, ThreeLevelCache
from mmsdk.models.text.deepseek_v4 import PRESETS, preset

__all__ = ["Levels"]

# One layer of each kind, as narrow as it can be: what is measured is the memory, and that it is really read.
_SMALL = DeepseekV4Config(
    vocabulary=256, stream=16, context=1 << 20, kinds=("sliding", "csa", "hca"), heads=2, head_dim=16, turning=4, query_rank=8, groups=1,
    group_rank=8, index_heads=1, index_dim=4, index_topk=8, hashed=(0,), theta=1e4, compressed_theta=1.6e5, compressed_scaling=Unscaled(),
    streams=2, mixture=Mixture(experts=4, chosen=1, inner=8, shared=8, scoring="sqrt_softplus", balanced=True, normalised=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Levels:
    """Reads `tokens` tokens, `chunk` at one time; the last rows are for that many tokens of the published models, of which none is run."""

    tokens: int = 1_000_000
    chunk: int = 2048

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {model, level, layers, entries, share, bytes, bytes_uncompressed, tok_s, grown_mib}.

        `entries` are those of one layer and `share` is entries / tokens; in the last row of a model, of all levels together, it is the
        share of `bytes_uncompressed`, which the same layers would hold if every token stayed as it is. `grown_mib` is the most that the
        process ever had above what it had before the first token.
        """
        for name in ("tokens", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        with busy(f"reading {self.tokens} tokens"):
            cache, seconds, grown = self._read(_small())
        run: dict[str, Cell] = {"tok_s": self.tokens / seconds, "grown_mib": grown}
        rows = _rows("small, float32", _SMALL.plan, self.tokens, cache, run)
        for name in PRESETS:
            plan = preset(name).plan
            empty = ThreeLevelCache.allocate(plan, 1, self.tokens, torch.bfloat16, "meta")
            rows += _rows(f"{name}, bfloat16", plan, self.tokens, empty, {"tok_s": None, "grown_mib": None})
        return rows

    @torch.no_grad()
    def _read(self, decoder: DeepseekV4Decoder) -> tuple[ThreeLevelCache, float, float]:
        """The memory after all tokens, seconds, and growth in MiB."""
        cache, generator = decoder.memory(1, self.tokens), torch.Generator().manual_seed(1)
        before, started = _resident("VmRSS"), time.perf_counter()
        for start in range(0, self.tokens, self.chunk):
            positions = torch.arange(start, min(start + self.chunk, self.tokens))[None]
            ids = torch.randint(0, _SMALL.vocabulary, positions.shape, generator=generator)
            hidden = decoder(decoder.embed(ids), positions, cache)
        assert bool(hidden.isfinite().all()), "the last tokens' states are numbers"
        return cache, time.perf_counter() - started, _resident("VmHWM") - before


def _small() -> DeepseekV4Decoder:
    """Random weights of a size that keeps activations near one."""
    decoder, generator = DeepseekV4Decoder(_SMALL), torch.Generator().manual_seed(0)
    for name, weight in decoder.named_parameters():
        torch.nn.init.normal_(weight.requires_grad_(False), float("norm" in name), 0.2, generator)
    return decoder.eval()


def _rows(model: str, plan: Plan, tokens: int, cache: ThreeLevelCache, run: dict[str, Cell]) -> list[dict[str, Cell]]:
    """A row for each level, and one for their sum."""
    held, size = cache.levels(), torch.float32.itemsize if model.startswith("small") else torch.bfloat16.itemsize
    layers = {"window": len(plan.series), "waiting": sum(map(bool, plan.series))}
    entries, kept = {"window": min(tokens, plan.window), "waiting": 0}, plan.width * size * tokens
    for series in (one for layer in plan.series for one in layer):
        layers[series.level] = layers.get(series.level, 0) + 1
        entries[series.level] = tokens // series.rate
    rows: list[dict[str, Cell]] = [
        {
            "model": model, "level": level, "layers": layers[level], "entries": entries[level], "share": entries[level] / tokens,
            "bytes": held[level], "bytes_uncompressed": layers[level] * kept if level in ("csa", "hca") else None, **run,
        }
        for level in held
    ]  # fmt: skip
    all_kept = len(plan.series) * kept
    whole: dict[str, Cell] = {"level": "all", "layers": len(plan.series), "entries": None, "share": cache.nbytes / all_kept}
    return [*rows, {**rows[0], **whole, "bytes": cache.nbytes, "bytes_uncompressed": all_kept}]


def _resident(name: str) -> float:
    """MiB of memory that the process has now (VmRSS) or had at most (VmHWM); 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
