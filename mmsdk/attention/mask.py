"""Who sees what: the mask between new tokens and the entries of a cache's view, decided from positions.

A token sees the entries whose position is not after its own; padding sees nothing and is seen by nothing. Where the host knows that rows
hold no padding and run in order, the mask has no tensor at all, so that an attention may take its fast path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.kernels._triton import launchable
from mmsdk.kv.types import LayerView, PagedView, View

__all__ = ["Band", "Bias", "Causal", "Everything", "Mask", "Masks", "side_by_side", "sliced"]


@dataclass(frozen=True, slots=True)
class Everything:
    """Every query sees every entry."""


@dataclass(frozen=True, slots=True)
class Causal:
    """The queries are the entries themselves, in order: query i sees entries 0 to i."""


@dataclass(frozen=True, slots=True)
class Band:
    """What a kernel can be told in the place of a bias: the queries are the last columns, and each sees its own and those before it.

    Of these at most `window`, where that is not 0, and not the first `padding` columns of its row.
    """

    padding: Int[Tensor, " b"]
    window: int


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the scores: 0 where seen, -inf where not. `alive` tells which queries see anything; the bias of the others is 0.

    That way no softmax meets a row of -inf, whose gradient would be no number. `band`, where known, says the same; who is told of it need
    not ask for the others, which `made` gives.
    """

    made: Callable[[], tuple[Float[Tensor, "#b 1 s t"], Bool[Tensor, "#b 1 s 1"]]]
    band: tuple[Band, ...] = ()

    @property
    def bias(self) -> Float[Tensor, "#b 1 s t"]:
        """For every pair."""
        return self.made()[0]

    @property
    def alive(self) -> Bool[Tensor, "#b 1 s 1"]:
        """For every query."""
        return self.made()[1]

    @staticmethod
    def both(bias: Float[Tensor, "#b 1 s t"], alive: Bool[Tensor, "#b 1 s 1"]) -> "Bias":
        """Of what is there."""
        return Bias(lambda: (bias, alive))

    @staticmethod
    def of(mask: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"], dtype: torch.dtype) -> "Bias":
        """From a mask that is True where seen, or that is added to the scores with -inf where nothing is seen."""
        if mask.dtype == torch.bool:
            alive = mask.any(-1, keepdim=True)
            return Bias.both(torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask & alive, -torch.inf), alive)
        alive = mask.amax(-1, keepdim=True) > -torch.inf
        return Bias.both(mask.masked_fill(~alive, 0).to(dtype), alive)

    @staticmethod
    def beside(band: Band, seen: Callable[[], Bool[Tensor, "#b 1 s t"]], dtype: torch.dtype) -> "Bias":
        """What a band says, to be made of such a mask when somebody asks, and once."""

        def made() -> tuple[Tensor, Tensor]:
            found = Bias.of(seen(), dtype)
            return found.bias, found.alive

        return Bias(cache(made), (band,))


Mask = Everything | Causal | Bias


def sliced(mask: Mask, start: int, stop: int, entries: Float[Tensor, "b t w"]) -> Mask:
    """The mask of some of the queries, over all of these entries."""
    if isinstance(mask, Everything):
        return mask
    if isinstance(mask, Bias):
        return Bias.both(mask.bias[:, :, start:stop], mask.alive[:, :, start:stop])
    columns = torch.arange(entries.shape[1], device=entries.device)
    late = columns > columns[start:stop, None]
    return Bias.both(torch.zeros_like(late, dtype=torch.float32).masked_fill_(late, -torch.inf)[None, None], ~late[None, None, :, :1])


def side_by_side(view: PagedView, mask: Mask, dtype: torch.dtype) -> tuple[LayerView, Mask]:
    """The tokens of pages next to one another, and a mask under which padding, which lay nowhere and now has columns, stays unseen."""
    if isinstance(mask, Everything) and not view.ordered:
        mask = Bias.of(view.valid[:, None, None], dtype)
    return view.gathered(), mask


class Masks:
    """The masks of one pass through the decoder; layers whose views hold the same entries share one.

    `explicit`, where given, takes the place of positions and padding alike: it alone says who sees what. `reach` is the last position
    that each token sees, where that is not its own; with a `window` above 0, only the last so many positions are seen. `mass`, by position
    (`mmsdk.kv.dense.DenseCache.mass`), is added to the scores of what is seen.
    """

    def __init__(
        self,
        positions: Int[Tensor, "b s"],
        dtype: torch.dtype,
        explicit: Bool[Tensor, "#b 1 s t"] | Float[Tensor, "#b 1 s t"] | None,
        reach: tuple[Int[Tensor, "b s"], ...] = (),
        window: int = 0,
        mass: tuple[Float[Tensor, "b p"], ...] = (),
    ) -> None:
        self._positions = positions
        self._reach = reach
        self._window = window
        self._mass = mass
        self._dtype = dtype
        self._explicit = None if explicit is None else Bias.of(explicit, dtype)
        self._entries: Tensor | None = None
        self._mask: Mask = Everything()
        self._rows: dict[int, Masks] = {}

    @property
    def positions(self) -> Int[Tensor, "b s"]:
        """Those of the new tokens."""
        return self._positions

    @property
    def window(self) -> int:
        """Of how many last positions anything is seen; 0 for all."""
        return self._window

    def row(self, place: int) -> "Masks":
        """The same of one row, whose view is its own. Raises InputError with an explicit mask, which is for one view of all."""
        if self._explicit is not None:
            raise InputError("an explicit mask says who sees what, and rows with views of their own do not fit it", item="mask")
        if place not in self._rows:
            here = slice(place, place + 1)
            reach, mass = (tuple(rows[here] for rows in of) for of in (self._reach, self._mass))
            self._rows[place] = Masks(self._positions[here], self._dtype, None, reach, self._window, mass)
        return self._rows[place]

    def repeated(self, times: int) -> "Masks":
        """The same where every row stands below itself so many times, as when the heads of a layer hold different tokens.

        Raises InputError with an explicit mask, which says nothing of heads.
        """
        if self._explicit is not None:
            raise InputError("an explicit mask says who sees what, and heads that hold different tokens do not fit it", item="mask")
        reach, mass = (tuple(rows.repeat_interleave(times, dim=0) for rows in of) for of in (self._reach, self._mass))
        return Masks(self._positions.repeat_interleave(times, dim=0), self._dtype, None, reach, self._window, mass)

    def of(self, view: View) -> Mask:
        """The mask of a layer's view. Raises InputError where an explicit mask was made for another number of entries."""
        if self._explicit is not None:
            return _fitting(self._explicit, self._positions.shape[1], view.positions.shape[1])
        if view.positions is not self._entries:
            self._entries, self._mask = view.positions, self._built(view)
        return self._mask

    def _built(self, view: View) -> Mask:
        queries, entries = self._positions.shape[1], view.positions.shape[1]
        if self._mass or self._reach or 0 < self._window < entries:
            return self._bounded(view)
        if isinstance(view, PagedView) and queries == 1 and view.ascending:
            # The last of its row sees the whole row, and padding lies nowhere.
            return Everything()
        if view.ordered and queries == 1:
            return Everything()
        if view.ordered and queries == entries:
            return Causal()
        # Rows in order all see alike, whatever their positions are.
        rows = slice(0, 1) if view.ordered else slice(None)
        positions, valid = view.positions[rows, None, :], view.valid[rows, None, :]
        return self._biased(view, lambda: (positions <= self._positions[rows, :, None]) & valid)

    def _bounded(self, view: View) -> Mask:
        """Where more or less is seen than what stands before."""
        last = self._reach[0] if self._reach else self._positions
        positions, valid = view.positions[:, None, :], view.valid[:, None, :]

        def seen() -> Tensor:
            found = (positions <= last[:, :, None]) & valid
            return found & (positions > self._positions[:, :, None] - self._window) if self._window else found

        bias = self._biased(view, seen)
        for mass in self._mass:
            own = mass.gather(1, (view.positions + 1).clamp_max(mass.shape[1] - 1))
            bias = Bias.both(bias.bias + own[:, None, None].to(self._dtype), bias.alive)
        return bias

    def _biased(self, view: View, seen: Callable[[], Bool[Tensor, "#b s t"]]) -> Bias:
        for band in self._band(view):
            return Bias.beside(band, lambda: seen()[:, None], self._dtype)
        return Bias.of(seen()[:, None], self._dtype)

    def _band(self, view: View) -> tuple[Band, ...]:
        """The band that these positions make, if they do, where a kernel could use it.

        Of rows in order the host knows it, but where a window of positions has to be one of columns. Else the device is asked: once for
        layers that share their entries, and again in each layer of a memory whose layers hold different ones.
        """
        queries, entries = self._positions.shape[1], view.positions.shape[1]
        if queries == 1 or self._mass or self._reach or not launchable(view.positions):
            return ()
        window = self._window if self._window < entries else 0
        if window or not view.ordered:
            steps, real = view.positions.diff(dim=1), view.valid
            # behind a real column only real ones, in order; a window counts columns where it should count positions
            rising = ((steps == 1) if window else (steps > 0)) & real[:, 1:] | ~real[:, :-1]
            own = view.positions[:, -queries:] == self._positions
            if not bool(rising.all() & own.all()):
                return ()
        return (Band(entries - view.lengths, window),)


def _fitting(bias: Bias, queries: int, entries: int) -> Bias:
    if bias.bias.shape[-2:] != (queries, entries):
        raise InputError(f"it is for {tuple(bias.bias.shape[-2:])}, there are {queries} new tokens and {entries} entries", item="mask")
    return bias
