"""What commands that answer have in common: settings from flags, an answer as JSON, and notes on what was shown."""

import argparse
import dataclasses
import sys
from dataclasses import dataclass

from mmsdk.answer import Answer
from mmsdk.apps.beforehand import check_named, text_in
from mmsdk.generate.config import EarlyStopping, GenerationConfig
from mmsdk.generate.constrain import Constraint
from mmsdk.generate.logprobs import Likely, Said
from mmsdk.models.types import Tokenizer
from mmsdk.vision.intake import ANIMATED, check

__all__ = ["Form", "as_json", "check_shown", "config_of", "form_of", "tell_notes"]


_EARLY: dict[str, EarlyStopping] = {"no": False, "yes": True, "never": "never"}


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer is to be, as the pipeline is told; anything where nothing is said."""

    schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    @staticmethod
    def of(schema: str | None = None, regex: str | None = None, choice: str | None = None) -> "Form":
        """From words: the file of a JSON Schema, a regular expression, choices between commas. Raises InputError for a file not read."""
        words = None if choice is None else tuple(map(str.strip, choice.split(",")))
        return Form(None if schema is None else text_in(schema, "the schema "), regex, words)

    @property
    def constraint(self) -> Constraint:
        """The same for generation. Raises as `Constraint.of` does."""
        return Constraint.of(self.schema, self.regex, self.choice)


def form_of(args: argparse.Namespace) -> Form:
    """The form that the flags of `mmsdk.apps.flags.FORMS` say. Raises InputError for a schema that cannot be read."""
    return Form.of(args.schema, args.regex, args.choice)


def config_of(args: argparse.Namespace, form: Form) -> GenerationConfig:
    """The settings that the flags of `mmsdk.apps.flags.SAMPLING` say, and the form. Raises InputError naming the one that cannot be."""
    return GenerationConfig(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        max_time=args.max_time,
        logprobs=args.logprobs,
        constraint=form.constraint,
        num_beams=args.num_beams,
        length_penalty=args.length_penalty,
        early_stopping=_EARLY[args.early_stopping],
    )


def as_json(answer: Answer, model: str, tokenizer: Tokenizer, config: GenerationConfig) -> dict[str, object]:
    """An answer to what was asked by these settings as one object; `logprobs` is there where they were asked for, `score` of beams,
    `fidelity` of each input where any was compressed."""
    told: dict[str, object] = {
        "text": str(answer),
        "model": model,
        "tokens": dataclasses.asdict(answer.tokens),
        "timings_ms": {stage: round(ms, 2) for stage, ms in dataclasses.asdict(answer.timings).items()},
        "seed": answer.seed,
        "finish": answer.finish,
    }
    if answer.tokens.kept < answer.tokens.visual:
        told["fidelity"] = [None if sight.fidelity is None else dataclasses.asdict(sight.fidelity) for sight in answer.sights]
    if config.num_beams > 1:
        told["score"] = answer.score
    if answer.logprobs:
        told["logprobs"] = [{**_likely(one, tokenizer), "top": [_likely(other, tokenizer) for other in one.top]} for one in answer.logprobs]
    return told


def check_shown(path: str) -> None:
    """Raises InputError where a word of a command line cannot be a picture or a clip; nothing is fetched from anywhere."""
    check_named(path)
    check(path)


def tell_notes(answer: Answer, moving: str = "in `mmsdk chat`, /video reads them all") -> None:
    """Say on stderr what of the pictures and clips was not looked at; `moving` is how an animation is read as a clip here."""
    for sight in answer.sights:
        for note in sight.notes:
            told = f"{note.partition(';')[0]}; {moving}" if note == ANIMATED else note
            print(f"mmsdk: {sight.source}: {told}", file=sys.stderr)


def _likely(one: Said | Likely, tokenizer: Tokenizer) -> dict[str, object]:
    spelled = tokenizer.spelled(one.id)
    return {"token": spelled.decode(errors="replace"), "bytes": list(spelled), "id": one.id, "logprob": one.logprob}
