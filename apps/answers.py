"""What commands that answer have in common: settings from flags, an answer as JSON, and notes on what was shown."""

import argparse
import dataclasses
import sys

from mmsdk.answer import Answer
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.logprobs import Likely, Said
from mmsdk.models.types import Tokenizer

__all__ = ["as_json", "config_of", "tell_notes"]


def config_of(args: argparse.Namespace) -> GenerationConfig:
    """The settings that the flags of `mmsdk.apps.arguments.SAMPLING` say. Raises InputError naming the one that cannot be."""
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
    )


def as_json(answer: Answer, model: str, tokenizer: Tokenizer) -> dict[str, object]:
    """An answer as one object; `logprobs` is there where they were asked for."""
    told: dict[str, object] = {
        "text": str(answer),
        "model": model,
        "tokens": dataclasses.asdict(answer.tokens),
        "timings_ms": {stage: round(ms, 2) for stage, ms in dataclasses.asdict(answer.timings).items()},
        "seed": answer.seed,
        "finish": answer.finish,
    }
    if answer.logprobs:
        told["logprobs"] = [{**_likely(one, tokenizer), "top": [_likely(other, tokenizer) for other in one.top]} for one in answer.logprobs]
    return told


def _likely(one: Said | Likely, tokenizer: Tokenizer) -> dict[str, object]:
    return {"token": tokenizer.decode([one.id]), "id": one.id, "logprob": one.logprob}


def tell_notes(answer: Answer) -> None:
    """Say on stderr what of the pictures and clips was not looked at."""
    for sight in answer.sights:
        for note in sight.notes:
            print(f"mmsdk: {sight.source}: {note}", file=sys.stderr)
