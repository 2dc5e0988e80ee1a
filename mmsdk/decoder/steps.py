"""Decode steps as they are asked for, and on a GPU as CUDA graphs: one launch in the place of some hundreds.

    logits = next_scores(decoder, ids, cache)      # one more token of every row; the scores of the next one

A step of a few rows is so little work that a processor is slower in telling a GPU of each kernel than the GPU is in running it. A graph is
told once: it is recorded for a number of rows and a number of blocks a row, and repeats the same kernels on the same memory. So a step's
tokens, positions and tables are copied to where the graph reads them (`mmsdk.kv.fixed`), and rows are filled up to the next power of two by
some that attend to nothing. Both ways run the same function: without a GPU it is called where else it would be recorded.

Taken are decoders of grouped-query attention over exact pages (`kv="paged"`, and what an engine keeps), with nothing that a host has to
look at amid a step: no experts, no layers that see a window, no adapters, no hooks. Everything else goes the way of `Decoder.__call__`.
Where a step cannot be recorded, of which a warning tells once, it is called each time.
"""

import threading
import warnings
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.attention.dense import Dense
from mmsdk.decoder.config import Grouped, Plain
from mmsdk.decoder.native import NOTHING, Parts
from mmsdk.decoder.transformer import Decoder, Layer, SelfAttention, no_stepping
from mmsdk.decoder.types import Speaker
from mmsdk.kernels._triton import launchable, power
from mmsdk.kv.fixed import FixedCache
from mmsdk.kv.paged import PagedCache
from mmsdk.kv.pages import Pages, Where
from mmsdk.kv.types import KVCache

__all__ = ["Recording", "Steps", "bucket", "next_hidden", "next_scores"]

# Rows of the largest graph, and blocks a row of the smallest: 1,024 tokens of pages of 16.
_ROWS, _BLOCKS = 64, 64
# Channels of a head that the kernels take.
_WIDEST = 256
# Runs before one is recorded, in which kernels are compiled and memory is found.
_WARM = 2


@torch.no_grad()
def next_scores(decoder: Speaker, ids: Int[Tensor, " b"], cache: KVCache) -> Float[Tensor, "b v"]:
    """The scores of the next token of every row, float32, after these; the cache then holds them. A token below 0 stands for any.

    Raises PoolFullError where a pool has no room for them.
    """
    known = ids.clamp_min(0)
    for logits in _stepped(decoder, known, cache, scored=True):
        return logits
    return decoder.logits(_called(decoder, known, cache))


@torch.no_grad()
def next_hidden(decoder: Decoder, ids: Int[Tensor, " b"], cache: KVCache) -> Float[Tensor, "b d"]:
    """The hidden states of these tokens, for who asks for scores of several things at one time."""
    for hidden in _stepped(decoder, ids, cache, scored=False):
        return hidden
    return _called(decoder, ids, cache)


def _stepped(decoder: Speaker, ids: Int[Tensor, " b"], cache: KVCache, scored: bool) -> tuple[Float[Tensor, "b _"], ...]:
    if type(decoder) is not Decoder:
        return ()
    if decoder.stepping is no_stepping and ids.is_cuda:
        decoder.stepping = Steps(decoder)
    return decoder.stepping(ids, cache, scored)


def _called(decoder: Speaker, ids: Int[Tensor, " b"], cache: KVCache) -> Float[Tensor, "b d"]:
    return decoder(decoder.embed(ids[:, None]), cache.position[:, None], cache)[:, -1]


def bucket(rows: int, blocks: int) -> tuple[int, int]:
    """For how many rows, and blocks a row, a step of so many is recorded; 0 rows where there are too many."""
    return (power(rows) if rows <= _ROWS else 0), max(power(blocks), _BLOCKS)


class Recording:
    """The step of a decoder for up to so many rows of a pool, of up to so many blocks each; with its scores, or up to the last norm."""

    def __init__(self, decoder: Decoder, pages: Pages, rows: int, blocks: int, scored: bool) -> None:
        self._decoder, self._scored = decoder, scored
        self._ids: Int[Tensor, "b 1"] = torch.zeros(rows, 1, dtype=torch.long, device=pages.device)
        self._cache = FixedCache(pages, rows, blocks)
        self._out: Float[Tensor, "b _"] = torch.empty(0, 0, device=pages.device)
        self._graph: tuple[torch.cuda.CUDAGraph, ...] = ()

    def __call__(
        self, ids: Int[Tensor, " r"], where: Where, position: Int[Tensor, " r"], shift: Int[Tensor, " r"], recorded: bool
    ) -> Float[Tensor, "r _"]:
        """What comes out for these rows, at most as many as it is for. Raises RuntimeError, torch's, where it cannot be recorded."""
        self._ids[: len(ids), 0] = ids
        self._ids[len(ids) :] = 0
        self._cache.fill(where, position, shift)
        if recorded and not self._graph:
            self._record()
        for graph in self._graph:
            graph.replay()
        if not self._graph:
            self._run()
        # the next step writes over them
        return self._out[: len(ids)].clone()

    def _run(self) -> None:
        decoder, cache = self._decoder, self._cache
        hidden: Tensor = decoder(decoder.embed(self._ids), cache.position[:, None], cache)
        self._out = decoder.logits(hidden[:, -1]) if self._scored else hidden[:, -1]

    def _record(self) -> None:
        with torch.cuda.device(self._ids.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                # each stores the same tokens in the same slots
                for _ in range(_WARM):
                    self._run()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
            self._graph = (graph,)


class Steps:
    """The recordings of a decoder, made when they are first asked for, and anew when its weights are others by then."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._recorded = False
        self._parts, self._fits = NOTHING, False
        self._hooks: tuple[Mapping[int, object], ...] = ()
        self._made: WeakKeyDictionary[Pages, dict[tuple[int, int, bool], Recording]] = WeakKeyDictionary()
        # A recording is one place in memory, whoever asks.
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Steps"], tuple[Decoder]]:
        """A copy is of its own decoder, and has recorded nothing."""
        return Steps, (self.decoder,)

    def __call__(self, ids: Int[Tensor, " b"], cache: KVCache, scored: bool) -> tuple[Float[Tensor, "b _"], ...]:
        """See `mmsdk.decoder.transformer.Stepping`."""
        rows, _ = bucket(len(ids), 1)
        if not rows or not isinstance(cache, PagedCache) or torch.is_grad_enabled():
            return ()
        with self._lock:
            if not self._takes():
                return ()
            position = cache.position
            return tuple(self._stepped(ids, pages, where, position, cache.shift, scored) for pages, where in cache.step())

    def _stepped(
        self, ids: Int[Tensor, " b"], pages: Pages, where: Where, position: Int[Tensor, " b"], shift: Int[Tensor, " b"], scored: bool
    ) -> Float[Tensor, "b _"]:
        size, made = (*bucket(*where.table.shape), scored), self._made.setdefault(pages, {})
        if size not in made:
            made[size] = Recording(self.decoder, pages, *size)
        try:
            return made[size](ids, where, position, shift, self._recorded)
        except RuntimeError as error:
            if not self._recorded:
                raise
            self._recorded = False
            warnings.warn(f"decode steps are not recorded as CUDA graphs here: {error}", RuntimeWarning, stacklevel=2)
        made[size] = Recording(self.decoder, pages, *size)
        return made[size](ids, where, position, shift, recorded=False)

    def _takes(self) -> bool:
        """Whether the decoder is of the kind that can be recorded, as it is now."""
        if self._parts is NOTHING or not self._parts.same:
            self._made.clear()
            self._parts, self._fits, self._recorded = Parts.of(self.decoder), _fits(self.decoder), self.decoder.norm.weight.is_cuda
            modules = list(self.decoder.modules())
            self._hooks = tuple(hooks for one in modules for hooks in (one._forward_hooks, one._forward_pre_hooks))
        return self._fits and not any(self._hooks)


def _fits(decoder: Decoder) -> bool:
    """Whether nothing amid a step has to be looked at by a host."""
    config = decoder.config
    plain = isinstance(config.attention, Grouped) and isinstance(config.feed, Plain) and not config.local.layers
    attentions = [layer.attention for layer in decoder.layers if isinstance(layer, Layer)]
    cores = [type(attention.core) for attention in attentions if isinstance(attention, SelfAttention)]
    # on a GPU without Triton pages are laid side by side, as long as the table is wide
    weight = decoder.norm.weight
    reads = config.head_dim <= _WIDEST and (weight.device.type == "cpu" or launchable(weight))
    return plain and reads and cores == [Dense] * len(decoder.layers)
