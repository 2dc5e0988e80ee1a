"""`mmsdk ask PATH... "question"`: one answer, streamed as text or printed as one JSON object."""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

from mmsdk.adapters import AdapterSpec
from mmsdk.answer import Answer
from mmsdk.apps.adapters import adapted
from mmsdk.apps.console import busy
from mmsdk.apps.explain import check_path, draw, save
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.constrain import Constraint
from mmsdk.legibility import LegibilityWarning
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.prompt import Prompt
from mmsdk.vision.intake import check, load

__all__ = ["run"]

USAGE = 'write: mmsdk ask PATH... "question"'


def run(args: argparse.Namespace) -> int:
    """Answer the question about the files. What is wrong with the words is told before the model is loaded, which takes seconds."""
    paths, question = _split(args.words)
    form = _form(args)
    constraint = Constraint.of(form.schema, form.regex, form.choice)
    config = GenerationConfig(args.max_tokens, args.temperature, seed=args.seed, constraint=constraint)
    if args.explain:
        check_path(Path(args.explain), paths)
    for path in paths:
        check(path)
    steps = args.compress or "identity"
    with busy(f"loading {args.model}"):
        pipe = pipeline(
            model=args.model, compress=steps, dtype=args.dtype, device=args.device, quantize=args.quantize, kv=args.kv,
            gguf_file=args.gguf_file, progress=not args.json,
        )  # fmt: skip
        worn = adapted(pipe, args.adapter)
    # said below, with the other notes
    warnings.simplefilter("ignore", LegibilityWarning)
    answer = (_whole if args.json else _streamed)(pipe, paths, question, config, form, worn)
    for sight in answer.sights:
        for note in sight.notes:
            print(f"mmsdk: {sight.source}: {note}", file=sys.stderr)
    if args.explain:
        save(draw([load(path) for path in paths], answer.sights, question, str(answer)), Path(args.explain))
    if args.json:
        print(json.dumps(_told(answer, pipe.vlm.name)))
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What the answer is to be, as the pipeline is told."""

    schema: str | None
    regex: str | None
    choice: tuple[str, ...] | None


def _form(args: argparse.Namespace) -> _Form:
    choice = None if args.choice is None else tuple(word.strip() for word in args.choice.split(","))
    if args.schema is None:
        return _Form(None, args.regex, choice)
    try:
        return _Form(Path(args.schema).read_text(encoding="utf-8"), args.regex, choice)
    except (OSError, ValueError) as error:
        raise InputError(f"the schema cannot be read: {error}", item=args.schema) from None


def _split(words: list[str]) -> tuple[list[str], str]:
    *paths, question = words
    if os.path.isfile(question):
        raise InputError(f"the last argument is the question, and this is a file; {USAGE}", item=question)
    Prompt.of((), question)
    if not paths:
        raise InputError(f"no picture or clip was named; {USAGE}", item=question)
    for path in paths:
        if path.lower().startswith(("http:", "https:")):
            raise InputError("addresses are not fetched from here; download it first", item=path)
        if not path.lower().startswith(("data:", "file:")) and not os.path.exists(path):
            raise InputError(f"there is no such file; the question comes last, as one word in quotes: {USAGE}", item=path)
    return paths, question


def _streamed(pipe: Pipeline, paths: list[str], question: str, config: GenerationConfig, form: _Form, worn: AdapterSpec) -> Answer:
    pieces = pipe.stream(
        paths, question, max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed,
        schema=form.schema, regex=form.regex, choice=form.choice, adapter=worn,
    )  # fmt: skip
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return pieces.answer


def _whole(pipe: Pipeline, paths: list[str], question: str, config: GenerationConfig, form: _Form, worn: AdapterSpec) -> Answer:
    return pipe(
        paths, question, max_tokens=config.max_tokens, temperature=config.temperature, seed=config.seed,
        schema=form.schema, regex=form.regex, choice=form.choice, adapter=worn,
    )  # fmt: skip


def _told(answer: Answer, model: str) -> dict[str, object]:
    return {
        "text": str(answer),
        "model": model,
        # one question asked once recalls nothing
        "tokens": {name: count for name, count in dataclasses.asdict(answer.tokens).items() if name != "recalled"},
        "timings_ms": {stage: round(ms, 2) for stage, ms in dataclasses.asdict(answer.timings).items()},
        "seed": answer.seed,
    }
