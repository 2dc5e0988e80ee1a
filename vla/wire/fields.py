"""A decoded message, read key by key: each value has the type that was asked for, and what nobody asked for is an error."""

import difflib
import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError
from mmsdk.vla.wire.codec import Array, flat

__all__ = ["Fields"]


class Fields:
    """Takes values out of a message, by their paths. Every method raises InputError for a value of another kind than it is about."""

    def __init__(self, message: Mapping[str, object]) -> None:
        pairs = list(flat(message))
        self._left, self._asked = dict(pairs), set[str]()
        if len(self._left) != len(pairs):
            raise InputError("two values have one path", item="message")

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def whole(self, key: str, default: int, least: int = -(2**63)) -> int:
        """A whole number, at least `least`."""
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._wrong(key, value, "a whole number" if least < 0 else f"a whole number from {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number; infinity is one, NaN is none."""
        value = self._take(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str) -> str:
        """A text, which must be there."""
        value = self._take(key, None)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def chosen(self, key: str, choices: frozenset[str]) -> frozenset[str]:
        """Some of the choices; all of them where the message does not say."""
        value = self._take(key, sorted(choices))
        if not isinstance(value, list) or any(not isinstance(entry, str) or entry not in choices for entry in value):
            raise self._wrong(key, value, f"a list of some of {', '.join(sorted(choices))}")
        return frozenset(value)

    def array(self, key: str) -> Array:
        """An array, which must be there."""
        value = self._take(key, None)
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, value, "a NumPy array")
        return value

    def vector(self, key: str, size: int) -> Float[Tensor, " n"]:
        """`size` finite numbers in a row; whole ones become float64, halves float32, others keep their type."""
        value = self._take(key, None)
        if isinstance(value, int | float) and not isinstance(value, bool):
            # a gripper's one number often comes alone
            value = np.array([value], dtype=np.float64)
        if not isinstance(value, np.ndarray) or value.ndim > 1 or value.size != size:
            raise self._wrong(key, value, f"a NumPy array of {size} numbers in a row; none is made up")
        return self._finite(key, value).reshape(-1)

    def matrix(self, key: str, width: int) -> Float[Tensor, "k n"]:
        """Finite numbers in rows of `width`; where they are not there, no rows."""
        value = self._take(key, np.zeros((0, width)))
        if not isinstance(value, np.ndarray) or value.ndim != 2 or (value.shape[1] != width and value.size):
            raise self._wrong(key, value, f"a NumPy array of rows of {width} numbers")
        return self._finite(key, value)

    def under(self, prefix: str) -> dict[str, float]:
        """The numbers whose paths begin so, by what follows."""
        keys = [key for key in self._left if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.number(key, 0.0) for key in keys}

    def end(self, ignored: frozenset[str] = frozenset()) -> None:
        """Raises InputError if a value has not been taken, other than those that are ignored."""
        for key in self._left:
            if key not in ignored:
                near = difflib.get_close_matches(key, sorted(self._asked), n=1)
                hint = f"did you mean {near[0]!r}? There is" if near else "there is"
                raise InputError(f"nobody asked for it; {hint} {', '.join(sorted(self._asked))}", item=key[:80])

    def _take(self, key: str, default: object) -> object:
        self._asked.add(key)
        return self._left.pop(key, default)

    def _finite(self, key: str, value: Array) -> Tensor:
        if value.dtype.kind not in "fiu":
            raise self._wrong(key, value, "numbers")
        tensor = torch.from_numpy(value.astype(np.float64) if value.dtype.kind in "iu" else value.astype(np.result_type(value, np.float32)))
        if not bool(tensor.isfinite().all()):
            raise InputError("it holds NaN or infinity", item=key)
        return tensor

    def _wrong(self, key: str, value: object, wanted: str) -> InputError:
        if value is None:
            there = ", ".join(name[:40] for name in list(self._left)[:20]) or "nothing"
            return InputError(f"missing, expected {wanted}; besides what was read, the message has {there}", item=key)
        told = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:60]
        return InputError(f"{told}, expected {wanted}", item=key)
