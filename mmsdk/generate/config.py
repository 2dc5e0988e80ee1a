"""How one request wants its text: how long, how random, how varied, where to end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from mmsdk.doors import doors
from mmsdk.errors import InputError
from mmsdk.generate.constrain import ANY, Constraint
from mmsdk.vision.values import shown

__all__ = ["EarlyStopping", "GenerationConfig", "Stop", "stops"]

Stop = str | Sequence[str] | None
"""Where an answer ends, as pipelines take it: before a string, before the first of several, or nowhere."""

EarlyStopping = bool | Literal["never"]
"""When beams are enough, as in transformers; see `mmsdk.generate.beams`."""


# They are kept for every token of an answer.
_LIKELIEST = 1000
# The length of an answer to such a power stays within what a float holds.
_STEEPEST = 16


@doors
@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The settings of one request; each row of a batch has its own.

    `temperature` 0 is greedy, and then `top_k`, `top_p`, `min_p` and `seed` play no part. `top_k` 0, `top_p` 1 and `min_p` 0 leave every
    token in. The same `seed` draws the same numbers alone, in a batch and after other requests, and so gives the same tokens, but for
    the rounding of scores in company. Text ends before the first occurrence of a string in `stop`.

    `repetition_penalty` makes likelier (below 1) or less likely (above) what stands in the prompt's words or was said already,
    `presence_penalty` and `frequency_penalty` what was said, once or by how often; see `mmsdk.generate.penalties`. Greedy text is changed
    by them, too.

    `max_time` is in seconds from the beginning of the work, what is done before the first token included; it is looked at between tokens,
    so that one is always said. `logprobs` k gives the logarithm of every token's probability, and the k likeliest in its place; 0 none.

    `constraint` says what form the answer is to have; see `mmsdk.generate.constrain`.

    `num_beams` above 1 searches for the likeliest whole answer among so many beginnings; then `length_penalty`, the power of its length
    that an answer's score is divided by, and `early_stopping` count, which play no part otherwise. Beams are not drawn: the temperature
    must be 0. See `mmsdk.generate.beams`.

    Raises InputError naming the setting that cannot be.
    """

    max_tokens: int = 128
    temperature: int | float = 0.0
    top_k: int = 0
    top_p: int | float = 1.0
    min_p: int | float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    repetition_penalty: int | float = 1.0
    presence_penalty: int | float = 0.0
    frequency_penalty: int | float = 0.0
    max_time: int | float = math.inf
    logprobs: int = 0
    constraint: Constraint = ANY
    num_beams: int = 1
    length_penalty: int | float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, "a whole number of at least 1")
        _real("temperature", self.temperature, lambda value: 0 <= value < math.inf, "a number of at least 0 (0 is greedy)")
        _whole("top_k", self.top_k, 0, "a whole number of at least 0 (0 leaves every token in)")
        _real("top_p", self.top_p, lambda value: 0 < value <= 1, "a number above 0 and up to 1")
        _real("min_p", self.min_p, lambda value: 0 <= value <= 1, "a number from 0 to 1")
        _whole("seed", self.seed, 0, "a whole number from 0 to 2**63 - 1")
        _check("stop", self.stop, isinstance(self.stop, tuple), 'a tuple of strings; write stop=("\\n",), with the comma')
        stops(self.stop)
        _real("repetition_penalty", self.repetition_penalty, _factor, "a number above 0 (1 is none)")
        _real("presence_penalty", self.presence_penalty, lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is none)")
        _real("frequency_penalty", self.frequency_penalty, lambda value: -2 <= value <= 2, "a number from -2 to 2 (0 is none)")
        _real("max_time", self.max_time, lambda value: value > 0, "a number of seconds above 0")
        told = f"a whole number from 0 to {_LIKELIEST:,} (0 gives none)"
        _whole("logprobs", self.logprobs, 0, told)
        _check("logprobs", self.logprobs, self.logprobs <= _LIKELIEST, told)
        _check("constraint", self.constraint, isinstance(self.constraint, Constraint), 'a form; write Constraint.of(choice=["yes", "no"])')
        _whole("num_beams", self.num_beams, 1, "a whole number of at least 1 (1 searches for none)")
        told = f"a number from -{_STEEPEST} to {_STEEPEST}"
        _real("length_penalty", self.length_penalty, lambda value: -_STEEPEST <= value <= _STEEPEST, told)
        enough = isinstance(self.early_stopping, bool) or (isinstance(self.early_stopping, str) and self.early_stopping == "never")
        _check("early_stopping", self.early_stopping, enough, 'True, False or "never"')
        if self.num_beams > 1 and self.temperature > 0:
            told = f"{self.num_beams} beams are searched for the likeliest answer, and the temperature {self.temperature} draws one"
            raise InputError(f"{told}; set temperature 0, or num_beams 1", item="num_beams")

    @property
    def penalised(self) -> bool:
        """Whether what was said before changes the scores."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is always the one that is said."""
        return self.temperature == 0 and not self.penalised and self.constraint.kind == "any" and self.num_beams == 1


def stops(stop: Stop) -> tuple[str, ...]:
    """The strings that end an answer; one may stand alone, as in OpenAI's API. Raises InputError for what is empty or no text."""
    several = (stop,) if isinstance(stop, str) else () if stop is None else stop
    fits = isinstance(several, list | tuple) and all(isinstance(text, str) and text for text in several)
    _check("stop", stop, fits, 'a string, or a list or tuple of strings, none of them empty; write stop="\\n"')
    for text in several:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{shown(text)} is no Unicode, so that no answer has it: {error}", item="stop") from None
    return tuple(several)


def _factor(value: float) -> bool:
    # neither it nor what is divided by it leaves float32
    return 1e-30 <= value <= 1e30


def _whole(name: str, value: object, least: int, expected: str) -> None:
    # NumPy's whole numbers count as such; True and False do not. 2**63 is where torch's end.
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool) and least <= int(value) < 2**63
    _check(name, value, fits, expected)


def _real(name: str, value: object, holds: Callable[[float], bool], expected: str) -> None:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    _check(name, value, number and bool(holds(cast(float, value))), expected)


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"{shown(value)} is not {expected}", item=name)
