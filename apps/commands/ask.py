"""`mmsdk ask PATH... "question"`: one answer, streamed as text or printed as one JSON object."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from mmsdk.answer import Answer
from mmsdk.apps.explain import check_path, draw
from mmsdk.errors import InputError
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.vision.intake import load

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Answer the question about the files."""
    paths, question = _split(args.words)
    if args.explain:
        check_path(Path(args.explain))
    pipe = pipeline("image-text-to-text", model=args.model, compress=args.compress, dtype=args.dtype, device=args.device)
    answer = _json(pipe, args, paths, question) if args.json else _text(pipe, args, paths, question)
    if args.explain:
        draw([load(path) for path in paths], answer.sights, f"{question} {answer}").save(args.explain)
    return 0


def _split(words: list[str]) -> tuple[list[Path], str]:
    *paths, question = words
    if os.path.isfile(question):
        raise InputError('the last argument is the question, and this is a file; write: mmsdk ask PATH... "question"', item=question)
    if not paths:
        raise InputError('no picture or clip was named; write: mmsdk ask PATH... "question"', item=question)
    for path in paths:
        # told before the model is loaded, which takes seconds
        if not os.path.exists(path):
            raise InputError("there is no such file", item=path)
    return [Path(path) for path in paths], question


def _text(pipe: Pipeline, args: argparse.Namespace, paths: list[Path], question: str) -> Answer:
    pieces = pipe.stream(paths, question, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return pieces.answer


def _json(pipe: Pipeline, args: argparse.Namespace, paths: list[Path], question: str) -> Answer:
    answer = pipe(paths, question, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    told = {
        "text": str(answer),
        "model": pipe.vlm.name,
        "tokens": dataclasses.asdict(answer.tokens),
        "timings_ms": {stage: round(ms, 2) for stage, ms in dataclasses.asdict(answer.timings).items()},
        "seed": answer.seed,
    }
    print(json.dumps(told, ensure_ascii=False))
    return answer
