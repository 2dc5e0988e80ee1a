"""Train braco's coder for mini: `python -m mmsdk.apps.train_braco`. Resumable, seeded, offline once mini's training has its shards.

Learns E, Q and the residual map of each budget by distilling mini's answers (`mmsdk.apps.train_braco.distil`), calibrates the principal
directions, writes the coder and prints, on held-out pictures and clips, the full model, braco trained and untrained, uniform and random.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mmsdk.apps.train_braco.calibrate import apart, directions
from mmsdk.apps.train_braco.distil import Lessons, score
from mmsdk.apps.train_braco.loop import Recipe, learn
from mmsdk.apps.train_braco.sets import Media, Set, Target, export
from mmsdk.apps.train_mini.features import Shard, read
from mmsdk.apps.train_mini.finetune import layer_forward
from mmsdk.apps.train_mini.needs import check_compiling
from mmsdk.models.mini.family import Mini, load
from mmsdk.tokencomp.coder import read_coder
from mmsdk.tokencomp.methods.braco import Braco
from mmsdk.tokencomp.methods.random import Random
from mmsdk.tokencomp.methods.uniform import Uniform
from mmsdk.tokencomp.types import Compressor

__all__ = ["TARGETS", "main"]

TARGETS = (Target("image", 11, 10, 2), Target("image", 4, 3, 4), Target("clip", 4, 3, 4))
"""About 23x and 64x of a picture's 256 tokens, about 144x of the 512 of a clip. The fewer tokens there are, the more ways to pool has each.

By the rule a quarter of the tokens would be residual ones. What is asked about is things, of which low frequencies tell little, and
residual tokens learn to pool them: all but the mean are residual here, so that each looks for things in its part of the grid.
"""
CODER = "braco_mini.safetensors"
ROOM: dict[Media, int] = {"image": 112, "clip": 80}
RANK = 64


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_braco", description=(__doc__ or "").splitlines()[0])
    recipe = Recipe()
    parser.add_argument("--shards", type=Path, default=Path("build/train_mini"), help="where mini's training keeps its shards")
    parser.add_argument("--use", type=int, default=2, help="how many of the training shards to draw from")
    parser.add_argument("--folder", type=Path, default=Path("build/train_braco"), help="where checkpoints and the coder are kept")
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--lessons", type=int, default=recipe.lessons, help="steps after which the same batches come again")
    parser.add_argument("--media", nargs="+", choices=tuple(ROOM), default=tuple(ROOM), help="what to distil for; else the start is kept")
    parser.add_argument("--start", default="", metavar="CODER", help="a coder to go on from: the name of one that ships, or a file")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile (slower, no C++ compiler needed)")
    parser.add_argument("--rows", type=int, default=4, help="pictures or clips in a step")
    parser.add_argument("--rate", type=float, default=recipe.rate)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--evaluate", type=int, default=120, help="held-out pictures, and as many clips, to score at the end")
    return parser.parse_args(argv)


def _report(vlm: Mini, held: Shard, coder: Path, most: int) -> None:
    """A line for each budget and way to meet it."""
    lessons = Lessons(vlm, [held], 4, ROOM, once=True)
    for target in TARGETS:
        methods: dict[str, Compressor] = {"uniform": Uniform(), "random": Random(), "untrained": Braco()}
        methods["trained"] = Braco(coder=str(coder))
        found = score(vlm, lessons.all(target.media, most), list(methods.values()), target.count)
        for name, one in zip(("full", *methods), found, strict=True):
            told = {"accuracy": round(one.accuracy, 3), "kl": round(one.kl, 3), "questions": one.questions}
            print(json.dumps({"media": target.media, "tokens": target.count, "method": name, **told}))


def main(argv: Sequence[str] | None = None) -> None:
    """Go on from the last checkpoint to the end, then write and score the coder."""
    args = _arguments(argv)
    if not args.no_compile:
        check_compiling()
    args.folder.mkdir(parents=True, exist_ok=True)
    vlm = load("mini", None, torch.bfloat16, torch.device("cpu"))
    vlm.decoder.requires_grad_(False)
    shards = [read(args.shards / f"train{i}.safetensors") for i in range(args.use)]
    lessons = Lessons(vlm, shards, args.rows, ROOM)
    generator = torch.Generator().manual_seed(args.seed)
    score = {media: apart(vlm, shards[0], media) for media in ROOM}
    sets = [Set(target, lessons.grids(target.media), score[target.media], RANK, generator) for target in TARGETS]
    known = read_coder(args.start, torch.device("cpu")).sets if args.start else {}
    for one in sets:
        if (one.target.media, one.target.count) in known:
            one.go_on(known[one.target.media, one.target.count])
    recipe = Recipe(steps=args.steps, lessons=args.lessons, rate=args.rate, seed=args.seed)
    layer: Callable[..., Tensor] = layer_forward if args.no_compile else torch.compile(layer_forward, dynamic=False)
    learn(vlm, lessons, [one for one in sets if one.target.media in args.media], recipe, args.folder, layer)
    made = f"{args.steps} steps of {args.rows} {' or '.join(args.media)}s, rate {args.rate:g}, seed {args.seed}"
    made += f", from {args.start}" if args.start else ""
    export(args.folder / CODER, "dct", sets, directions(vlm, shards[0]), f"{made}; {sum(map(len, shards))} samples")
    _report(vlm, read(args.shards / "held.safetensors"), args.folder / CODER, args.evaluate)


if __name__ == "__main__":
    main()
