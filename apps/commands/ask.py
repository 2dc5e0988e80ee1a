"""`mmsdk ask PATH... "question"`: one answer, streamed as text or printed as one JSON object. Models that read text alone need no path."""

import argparse
import json
import warnings
from dataclasses import asdict
from pathlib import Path

from mmsdk.adapters import AdapterSpec
from mmsdk.answer import Answer
from mmsdk.apps.adapters import adapted
from mmsdk.apps.answers import Form, as_json, check_shown, config_of, form_of, tell_notes
from mmsdk.apps.beforehand import SEEING, USAGE, split
from mmsdk.apps.console import busy
from mmsdk.apps.explain import draw, save
from mmsdk.errors import InputError
from mmsdk.generate.config import GenerationConfig
from mmsdk.legibility import LegibilityWarning
from mmsdk.models.language import Blind
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.prompt import Prompt
from mmsdk.vision.intake import load

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Answer the question about the files. What is wrong with the words is told before the model is loaded, which takes seconds."""
    paths, question = split(args.words, args.model)
    Prompt.of((), question)
    form = form_of(args)
    config = config_of(args, form)
    if args.n < 1:
        raise InputError(f"it is {args.n}, expected at least 1", item="--n")
    for path in paths:
        check_shown(path)
    steps = args.compress or "identity"
    with busy(f"loading {args.model}"):
        pipe = pipeline(
            model=args.model, compress=steps, dtype=args.dtype, device=args.device, quantize=args.quantize, kv=args.kv,
            gguf_file=args.gguf_file, progress=not args.json,
        )  # fmt: skip
        worn = adapted(pipe, args.adapter)
    if not paths and not isinstance(pipe.vlm.encoder, Blind):
        raise InputError(f"no picture or clip was named, and {args.model} {SEEING}; {USAGE}", item=question)
    # said below, with the other notes
    warnings.simplefilter("ignore", LegibilityWarning)
    if args.n > 1:
        answers = _several(pipe, paths, question, config, form, worn, args.n)
    else:
        answers = [_one(pipe, paths, question, config, worn, args.json)]
    tell_notes(answers[0])
    if args.explain:
        save(draw([load(path) for path in paths], answers[0].sights, question, str(answers[0])), Path(args.explain))
    if args.json:
        told = [_told(answer, pipe, config) for answer in answers]
        print(json.dumps({"answers": told} if args.n > 1 else told[0]))
    elif args.n > 1:
        print("\n\n".join(answers))
    return 0


def _one(pipe: Pipeline, paths: list[str], question: str, config: GenerationConfig, worn: AdapterSpec, whole: bool) -> Answer:
    """One answer, shown as it comes unless it is wanted as a whole. It is the first of a conversation that ends with it."""
    chat = pipe.chat("", config, adapter=worn)
    if whole:
        return chat(paths, question)
    pieces = chat.stream(paths, question)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return pieces.answer


def _several(
    pipe: Pipeline, paths: list[str], question: str, config: GenerationConfig, form: Form, worn: AdapterSpec, n: int
) -> list[Answer]:
    return pipe(
        paths,
        question,
        n=n,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
        stop=config.stop,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        max_time=config.max_time,
        logprobs=config.logprobs,
        schema=form.schema,
        regex=form.regex,
        choice=form.choice,
        num_beams=config.num_beams,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        adapter=worn,
    )


def _told(answer: Answer, pipe: Pipeline, config: GenerationConfig) -> dict[str, object]:
    told = as_json(answer, pipe.vlm.name, pipe.vlm.tokenizer, config)
    # one question asked once recalls nothing
    tokens = {name: count for name, count in asdict(answer.tokens).items() if name != "recalled"}
    return told | {"tokens": tokens}
