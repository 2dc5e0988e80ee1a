"""Train DORA's actor for mini's encoder: `python -m mmsdk.apps.train_dora`. Resumable, seeded; Ctrl-C finishes the update and saves.

Fits the probe on patches of drawn scenes, sees the pool of pictures once, lets the actor foretell which patches matter, trains it by
reinforcement, writes it, and prints what it is worth on held-out pictures. Every stage leaves its result in the folder and is skipped
when it is there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmsdk.apps.console import line_width, table
from mmsdk.apps.train_dora.learn import Recipe
from mmsdk.apps.train_dora.loop import World, export, train
from mmsdk.apps.train_dora.pictures import Drawn, Probe, cells, cells_of_shard, fit, recall
from mmsdk.apps.train_dora.pool import Pool, see
from mmsdk.apps.train_dora.score import score, speed
from mmsdk.apps.train_dora.warm import foretell
from mmsdk.apps.train_mini.features import read
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.tokencomp.actor import Actor, ActorConfig
from mmsdk.tokencomp.methods.dora import DORA
from mmsdk.vision.vit import ViT
from mmsdk.vision.weights import vit_from_onnx
from mmsdk.weights import pull

__all__ = ["ACTOR", "main"]

ACTOR = "dora_dinov2_small.safetensors"
BLOCKS = (3, 6)
"""Where the default actor looks. On a processor a look takes half as long as a block, so that one before each would eat what it saves."""
PROBE_SEED, POOL_SEED, HELD_OUT_SEED = 2_000_003, 2_000_005, 2_000_007


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_dora", description=(__doc__ or "").splitlines()[0])
    recipe = Recipe()
    parser.add_argument("--folder", type=Path, default=Path("build/train_dora"), help="where pictures and checkpoints are kept")
    parser.add_argument("--probe", type=int, default=1600, help="pictures that the probe is fitted on")
    parser.add_argument("--shard", type=Path, help="a shard of mini's training (train0.safetensors) to fit the probe on instead")
    parser.add_argument("--pool", type=int, default=768, help="pictures that episodes are played on")
    parser.add_argument("--updates", type=int, default=recipe.updates)
    parser.add_argument("--rows", type=int, default=recipe.rows, help="episodes of an update")
    parser.add_argument("--drop", type=float, default=1.0, help="accuracy to give away, in percentage points")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--evaluate", type=int, default=320, help="held-out pictures to score at the end (0: none)")
    return parser.parse_args(argv)


def _probe(folder: Path, vit: ViT, artist: Artist, args: argparse.Namespace) -> Probe:
    path = folder / "probe.safetensors"
    if not path.exists():
        width, drawn = vit.config.width, Drawn(artist, PROBE_SEED)
        seen = cells_of_shard(read(args.shard), width) if args.shard else cells(folder / "cells.safetensors", vit, drawn, args.probe)
        fit(seen).save(path)
    return Probe(**load_file(path))


def _actor(folder: Path, vit: ViT, pool: Pool, args: argparse.Namespace) -> Actor:
    """As it is before its first episode; of what a stopped run has learned, `train` takes up the rest."""
    torch.manual_seed(args.seed)
    actor = Actor(ActorConfig(vit.config.width, vit.config.layers, drop=args.drop, eligible=BLOCKS))
    if not (folder / "checkpoint.safetensors").exists():
        error = foretell(vit, actor, pool, args.seed)
        print(f"what to keep is foretold but for {error:.2f} of its variance", flush=True)
    return actor


def main(argv: Sequence[str] | None = None) -> None:
    """Run all stages that are not done yet."""
    args = _arguments(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    vit = vit_from_onnx(pull("mini")["encoder"]).to(getattr(torch, args.dtype))
    emoji, photos = pull("emoji")["images"], pull("photos")["images"]
    artist, unseen = Artist(emoji, photos), Artist(emoji, photos, held_out=True)
    probe, pictures = _probe(args.folder, vit, artist, args), Drawn(artist, POOL_SEED)
    origin = f"seed {POOL_SEED}: {args.pool} square scenes before block {BLOCKS[0]}, probe of {args.shard or args.probe}"
    pool = see(vit, probe, pictures, args.pool, BLOCKS[0], args.folder / "pool.safetensors", origin)
    print(f"the probe on pictures that it was not fitted on: {float(recall(pool.dense, pool.labels).mean()):.3f}", flush=True)
    actor = _actor(args.folder, vit, pool, args)
    recipe = Recipe(updates=args.updates, rows=args.rows, seed=args.seed)
    done, loop = train(World(vit, probe, pool), actor, recipe, args.folder)
    made = f"seed {args.seed}, {args.pool} pictures, {done} updates of {args.rows} episodes"
    print(f"{made}; lambda {loop.price:.3g}, {loop.drop:.2f} points of accuracy lost by drawn decisions", flush=True)
    export(args.folder / ACTOR, actor, made)
    if args.evaluate:
        by, held = DORA(actor=str(args.folder / ACTOR)), Drawn(unseen, HELD_OUT_SEED)
        print(table(score(vit, probe, held, args.evaluate, by), line_width()))
        print(table(speed(vit, held, by), line_width()))


if __name__ == "__main__":
    main()
