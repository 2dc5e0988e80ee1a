"""How one request wants its text: how long, how random, where to end."""

import math
from dataclasses import dataclass

from mmsdk.errors import InputError

__all__ = ["GenerationConfig"]


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The settings of one request; each row of a batch has its own.

    `temperature` 0 is greedy, and then the four settings after it play no part. `top_k` 0, `top_p` 1 and `min_p` 0 leave every
    token in. The same `seed` gives the same tokens alone, in a batch and after other requests. Text ends before the first
    occurrence of a string in `stop`. Raises InputError naming the setting that cannot be.
    """

    max_tokens: int = 128
    temperature: int | float = 0.0
    top_k: int = 0
    top_p: int | float = 1.0
    min_p: int | float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "a whole number of at least 1")
        _check("temperature", self.temperature, 0 <= self.temperature < math.inf, "a number of at least 0 (0 is greedy)")
        _check("top_k", self.top_k, self.top_k >= 0, "a whole number of at least 0 (0 leaves every token in)")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and up to 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        _check("seed", self.seed, 0 <= self.seed < 2**63, "a whole number from 0 to 2**63 - 1")
        _check("stop", self.stop, isinstance(self.stop, tuple) and all(self.stop), "a tuple of strings, none of them empty")


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"{value!r} is not {expected}", item=name)
