"""`mmsdk demo`: a real model answers questions about three pictures and a clip, with the time of each stage."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from mmsdk.answer import Answer
from mmsdk.apps.console import Cell, table
from mmsdk.apps.demo import Asked, show
from mmsdk.pipeline import pipeline

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print one table, and say where the annotated pictures are."""
    started = time.perf_counter()
    pipe = pipeline("image-text-to-text", model=args.model)
    ready = time.perf_counter() - started
    rows: list[dict[str, Cell]] = []

    def tell(asked: Asked, answer: Answer, picture: Path) -> None:
        rows.append(_row(asked, answer, picture))
        if not args.json:
            print(f"{asked.file}: {asked.question}\n  {answer}", flush=True)

    show(pipe, Path(args.out), tell)
    if args.json:
        print(json.dumps({"model": args.model, "ready_s": ready, "rows": rows}))
    else:
        # the answers stand above in full
        shown = [{key: value for key, value in row.items() if key not in ("question", "answer")} for row in rows]
        print(f"\n{table(shown)}\n\nmodel {args.model} ready in {ready:.1f} s; times in milliseconds; pictures in {args.out}/")
    return 0


def _row(asked: Asked, answer: Answer, picture: Path) -> dict[str, Cell]:
    times = {stage: round(ms) for stage, ms in dataclasses.asdict(answer.timings).items()}
    counts = {f"{name}_tokens": count for name, count in dataclasses.asdict(answer.tokens).items() if name != "kept"}
    return {"file": asked.file, "question": asked.question, "answer": str(answer), **counts, **times, "picture": str(picture)}
