"""`mmsdk demo`: a page in the browser, which needs the extra `demo`; with --write, files instead, which need nothing more.

Then a real model answers questions about three pictures and a clip, with the time of each stage, and annotated pictures are written; and
a robot opens a drawer in simulation, where one is installed (extra `robots`).
"""

import argparse
import dataclasses
import json
import os
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

from mmsdk.answer import Answer
from mmsdk.apps.console import Cell, busy, line_width, table
from mmsdk.apps.demo import TASK, Asked, act, show
from mmsdk.apps.loading import needing
from mmsdk.errors import InputError, MmsdkError
from mmsdk.pipeline import pipeline
from mmsdk.vla.envs.metaworld import TASKS, missing

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Serve the page, or write the files. Raises InputError, naming the extra, where a package is missing."""
    if args.write:
        return _written(args)
    code: int = needing("mmsdk.apps.web.main", "demo", "demo").run(args)
    return code


def _written(args: argparse.Namespace) -> int:
    """Print each answer as it comes, then one table of them, and say where the annotated pictures are."""
    folder = Path(args.out)
    _check(folder)
    started = time.perf_counter()
    with busy(f"loading {args.model}"):
        pipe = pipeline(
            model=args.model, dtype=args.dtype, device=args.device, quantize=args.quantize, kv=args.kv, gguf_file=args.gguf_file,
            progress=not args.json,
        )  # fmt: skip
    ready = time.perf_counter() - started
    rows: list[dict[str, Cell]] = []

    def tell(asked: Asked, answer: Answer, picture: Path) -> None:
        rows.append(_row(asked, answer, picture))
        if not args.json:
            print(f"{asked.file}: {asked.question}\n  {answer}", flush=True)

    show(pipe, folder, tell)
    robot = _acted(folder / "robot.gif")
    if args.json:
        print(json.dumps({"model": args.model, "ready_s": ready, "rows": rows, "robot": robot}))
    else:
        print(f"\n{table([_shown(row) for row in rows], line_width())}\n")
        print(f"visual, prompt and generated are tokens, the stages milliseconds; {args.model} was ready in {ready:.1f} s")
        print(f"pictures of what it looked at are in {folder}/")
        print(f"the robot: {robot['said']}")
    return 0


def _acted(film: Path) -> dict[str, Cell]:
    """What became of the robot's episode, and the same in words; where there is no simulator, what to install."""
    if lacks := missing():
        return {"task": TASK, "success": None, "film": None, "said": f"no simulator is installed here: {lacks}"}
    try:
        with busy("a robot opens a drawer in simulation"):
            ended = act(film)
    except MmsdkError as error:
        # what was asked of the pictures is still told
        return {"task": TASK, "success": None, "film": None, "said": f"its simulation broke off: {error}"}
    how = f"done after {ended.steps} steps" if ended.success else f"not done in {ended.steps} steps"
    return {"task": TASK, "success": ended.success, "film": str(film), "said": f'told "{TASKS[TASK][0]}": {how}; {film} shows it'}


def _check(folder: Path) -> None:
    """Before the model is loaded, make the folder or raise InputError where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"pictures cannot go there ({error.strerror}); name another folder with --out", item=str(folder)) from None
    if not os.access(folder, os.W_OK):
        raise InputError("pictures cannot go there: it may not be written to; name another folder with --out", item=str(folder))


def _shown(row: Mapping[str, Cell]) -> dict[str, Cell]:
    """A row of the table: short names, and no more of the answer than a column holds, since it stands above in full."""
    short = {key.removesuffix("_tokens"): value for key, value in row.items() if key not in ("question", "picture")}
    return short | {"answer": textwrap.shorten(str(row["answer"]), 40, placeholder=" ...")}


def _row(asked: Asked, answer: Answer, picture: Path) -> dict[str, Cell]:
    times = {stage: round(ms) for stage, ms in dataclasses.asdict(answer.timings).items()}
    counts = {f"{name}_tokens": count for name, count in dataclasses.asdict(answer.tokens).items() if name not in ("kept", "recalled")}
    return {"file": asked.file, "question": asked.question, "answer": str(answer), **counts, **times, "picture": str(picture)}
