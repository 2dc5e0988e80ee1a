"""What a pipeline gives back: text that also knows what it cost and what it was read from."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.generate.logprobs import Said
from mmsdk.tokencomp.fidelity import Fidelity
from mmsdk.tokencomp.types import Audit
from mmsdk.vision.values import brief

__all__ = ["Answer", "Sight", "Timings", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of one answer. `visual` before and `kept` after compression, `prompt` all that the decoder was given, `generated`.

    `recalled` of the prompt were known to the decoder from an earlier question, and not run again.
    """

    visual: int = 0
    kept: int = 0
    prompt: int = 0
    generated: int = 0
    recalled: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of each stage. Rows of a batch share the stages, and each carries the whole batch's time."""

    load: float = 0.0
    encode: float = 0.0
    compress: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        """All stages together."""
        return self.load + self.encode + self.compress + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Sight:
    """One visual input as the model looked at it: where its tokens stood, what the encoder found important, what was kept.

    `source` names the input; `positions` and `saliency` are those of the tokens before compression (`saliency` may be empty). `notes` are
    intake's: what of the input was not looked at, such as the other frames of an animation or the end of a clip that is cut short.
    `fidelity` is how much of the encoder's tokens is left (`mmsdk.tokencomp.fidelity`), None where the encoder itself was shortened, and
    there are none to compare with.
    """

    source: str
    grid: tuple[int, int, int]
    positions: Int[Tensor, "n 3"]
    saliency: Float[Tensor, " m"]
    audit: Audit
    notes: tuple[str, ...] = ()
    fidelity: Fidelity | None = Fidelity(0.0, 1.0, 1.0)

    def __repr__(self) -> str:
        return brief(self)


Finish = Literal["stop", "length", "time"]


class Answer(str):
    """The answer's text, a `str` in every way, with what it took: `.tokens`, `.timings`, `.seed`, `.finish`, `.sights`, `.audit`,
    `.ids`, the tokens that were generated.

    `.finish` is "length" at `max_tokens` and "time" at `max_time`. `.logprobs` has an entry for every token that was generated, those of a
    stop string among them, where they were asked for. `.precision` is the dtype that the language model computed in, behind how its
    matrices are stored: "bfloat16", "int4/bfloat16". `.score` is what an answer of `num_beams` was chosen by (`mmsdk.generate.beams`), 0 of
    any other.
    """

    __slots__ = ("finish", "ids", "logprobs", "precision", "score", "seed", "sights", "timings", "tokens")

    tokens: Tokens
    timings: Timings
    seed: int
    finish: Finish
    sights: tuple[Sight, ...]
    precision: str
    logprobs: tuple[Said, ...]
    ids: tuple[int, ...]
    score: float

    def __new__(
        cls,
        text: str,
        tokens: Tokens | None = None,
        timings: Timings | None = None,
        seed: int = 0,
        finish: Finish = "stop",
        sights: tuple[Sight, ...] = (),
        precision: str = "",
        logprobs: tuple[Said, ...] = (),
        ids: tuple[int, ...] = (),
        score: float = 0.0,
    ) -> "Answer":
        answer = super().__new__(cls, text)
        answer.tokens = tokens or Tokens()
        answer.timings = timings or Timings()
        answer.seed = seed
        answer.finish = finish
        answer.sights = sights
        answer.precision = precision
        answer.logprobs = logprobs
        answer.ids = ids
        answer.score = score
        return answer

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]  # str promises (str,), copies need the rest too
        told = self.tokens, self.timings, self.seed, self.finish, self.sights, self.precision, self.logprobs, self.ids, self.score
        return str(self), *told

    @property
    def audit(self) -> tuple[Audit, ...]:
        """What became of every source token, one audit per visual input."""
        return tuple(sight.audit for sight in self.sights)
