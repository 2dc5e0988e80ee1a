"""Train mini: `python -m mmsdk.apps.train_mini`. Resumable, seeded, offline once the bundles are there; Ctrl-C loses at most a step.

Draws the data and encodes it into shards, grounds the projector, fine-tunes by low-rank adapters, first on many visual tokens, then on
few, writes the adapter file and prints the accuracy on held-out data. Every stage leaves its result in the folder and is skipped when it
is there. Exit codes are those of `mmsdk`: 130 where Ctrl-C ended it, 2 for what the user can mend, 1 for weights that cannot be had.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps.interrupts import INTERRUPTED
from mmsdk.apps.kept import write
from mmsdk.apps.train_mini import few, loop
from mmsdk.apps.train_mini import finetune as tuning
from mmsdk.apps.train_mini import ground as grounding
from mmsdk.apps.train_mini.clips import Clip
from mmsdk.apps.train_mini.features import Renders, Shard, build, draw
from mmsdk.apps.train_mini.needs import check_compiling, check_rendering
from mmsdk.apps.train_mini.renders import render
from mmsdk.apps.train_mini.scenes import Artist, Scene
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, MmsdkError, WeightsError
from mmsdk.models.mini.adapter import Adapter, read_adapter
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import ADAPTER
from mmsdk.models.types import Codec
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.weights import vit_from_onnx
from mmsdk.weights import bundle, pull
from mmsdk.weights.gguf import read_gguf

__all__ = ["MIDDLE", "main"]

MIDDLE = (5,)
"""The encoder's further layer: half-way features tell colour and stroke, which the last layer has almost forgotten."""
HELD_OUT_SEED = 1_000_003


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mmsdk.apps.train_mini", description=(__doc__ or "").splitlines()[0])
    recipe = tuning.Recipe()
    parser.add_argument("--folder", type=Path, default=Path("build/train_mini"), help="where shards and checkpoints are kept")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto is a GPU where there is one")
    parser.add_argument("--shards", type=int, default=4, help="shards of drawn samples")
    parser.add_argument(
        "--drawn", type=int, nargs=3, default=(2500, 200, 300), metavar=("SCENES", "PHOTOS", "CLIPS"), help="what is in a shard"
    )
    parser.add_argument("--backdrops", type=int, default=1500, help="more scenes, each drawn on one of two dozen further pictures")
    parser.add_argument("--renders", type=int, default=2400, help="pictures of the robot simulators (0: none; needs mmsdk[robots])")
    parser.add_argument("--ground-steps", type=int, default=2000, help="steps of stage 0")
    parser.add_argument("--steps", type=int, default=recipe.steps, help="steps of stage 1")
    parser.add_argument("--full-steps", type=int, default=recipe.full_steps, help="last steps of these, with every visual token")
    parser.add_argument(
        "--few-steps", type=int, default=few.FewRecipe().steps, help="steps of stage 2, mostly with few visual tokens (0: none)"
    )
    parser.add_argument(
        "--start", metavar="ADAPTER", help='an adapter that stage 2 goes on from in place of stages 0 and 1: a file, or "mini"'
    )
    parser.add_argument("--rows", type=int, default=recipe.rows, help="pictures or clips in a step")
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile (half as fast, no C++ compiler needed)")
    parser.add_argument("--evaluate", type=int, default=60, help="held-out samples of each kind to score at the end")
    return parser.parse_args(argv)


def _device(name: str) -> torch.device:
    """Where to train. Raises InputError for a GPU that torch does not see."""
    here = torch.cuda.is_available()
    if name == "cuda" and not here:
        raise InputError("torch sees no GPU here; leave it out to train on the processor", item="--device cuda")
    return torch.device("cuda" if here and name != "cpu" else "cpu")


def _check(args: argparse.Namespace, device: torch.device) -> None:
    """Raises InputError, naming the fix, for what would fail after hours."""
    if device.type == "cpu" and not args.no_compile:
        check_compiling()
    if args.renders and not all((args.folder / f"{name}.safetensors").exists() for name in ("robot", "held_robot")):
        check_rendering()


def _encoder(device: torch.device, dtype: torch.dtype) -> Encoder:
    return Encoder(Dinov2(vit_from_onnx(pull("mini")["encoder"]).to(device, dtype), MIDDLE), Preprocess(), batch=16)


def _shards(args: argparse.Namespace, encoder: Encoder) -> tuple[list[Shard], Shard, Shard | None]:
    """(training shards, held-out drawn shard, held-out renders)."""
    emoji, photos = pull("emoji")["images"], pull("photos")["images"]
    artist, unseen = Artist(emoji, photos), Artist(emoji, photos, held_out=True)
    scenes, pictures, clips = args.drawn
    train = [_drawn(args.folder / f"train{i}.safetensors", artist, args.seed + i, tuple(args.drawn), encoder) for i in range(args.shards)]
    if args.backdrops:
        drawn_on = Artist(emoji, photos, backdrops=list(pull("backdrops").values()))
        train.append(_drawn(args.folder / "backdrops.safetensors", drawn_on, args.seed + 1000, (args.backdrops, 0, 0), encoder))
    fewer = (-(-4 * scenes // 25), -(-pictures // 5), -(-2 * clips // 5))
    held = _drawn(args.folder / "held.safetensors", unseen, HELD_OUT_SEED, fewer, encoder)
    if not args.renders:
        return train, held, None
    robot = _rendered(args.folder, "robot", args.renders, 0, encoder)
    return [*train, robot], held, _rendered(args.folder, "held_robot", args.renders // 6, 10_000, encoder)


def _drawn(path: Path, artist: Artist, seed: int, counts: tuple[int, int, int], encoder: Encoder) -> Shard:
    """Scenes, crops of photos and clips, in these numbers."""
    origin = "seed {}: {} scenes, {} photos, {} clips".format(seed, *counts)
    return build(path, draw(artist, seed, *counts), sum(counts), encoder, origin=origin, label=path.stem)


def _rendered(folder: Path, name: str, images: int, seed: int, encoder: Encoder) -> Shard:
    """Pictures and clips of the simulators."""
    clips = images * 7 // 30
    origin = f"seed {seed}: {images} renders, {clips} clips"
    items = _renders(folder / f"renders_{name}", images, clips, seed)
    return build(folder / f"{name}.safetensors", items, images + clips, encoder, origin=origin, label=name)


def _renders(folder: Path, images: int, clips: int, seed: int) -> Iterator[Scene | Clip]:
    """The same, rendered when the first is asked for."""
    render(folder, images=images, clips=clips, seed=seed)
    renders = Renders(folder)
    yield from itertools.chain(renders.scenes(), renders.clips())


def _ground(
    args: argparse.Namespace, projector: Projector, shards: Sequence[Shard], held: Shard, decoder: Decoder, tokenizer: Codec
) -> None:
    path = args.folder / "grounded.safetensors"
    if path.exists():
        projector.load_state_dict(load_file(path))
        return
    table = grounding.WordTable.of(decoder.embedding.weight.detach(), tokenizer)
    parts = [grounding.gather(shard, table) for shard in shards]
    grounding.ground(projector, grounding.joined(parts), table, steps=args.ground_steps, seed=args.seed)
    print("nearest words right on held-out patches:", grounding.probe(projector, grounding.gather(held, table), table))
    write(path, projector.state_dict())


def export(path: Path, projector: Projector, adapters: tuning.Adapters) -> None:
    """Write the file that ships: 16-bit projector and updates."""
    tensors = {f"projector.{k}": v for k, v in projector.state_dict().items()} | adapters.tensors()
    write(path, {k: v.detach().half() for k, v in tensors.items()}, {"middle": ",".join(map(str, MIDDLE))})


def _report(decoder: Decoder, projector: Projector, adapters: tuning.Adapters, held: Sequence[Shard], tokenizer: Codec, most: int) -> None:
    for shard in held:
        for family in sorted({loop.family(s) for s in shard.samples}):
            rows = [i for i, s in enumerate(shard.samples) if loop.family(s) == family][:most]
            for name in ("seeing", "blind", "shuffled"):
                found = loop.evaluate(
                    decoder, projector, adapters, shard, rows, tokenizer, blind=name == "blind", shuffled=name == "shuffled"
                )
                print(json.dumps({"family": family, "mode": name, **{k: [n, round(v, 3)] for k, (n, v) in found.items()}}))


def _train(
    args: argparse.Namespace, decoder: Decoder, tokenizer: Codec, shards: Sequence[Shard], held: Sequence[Shard],
    started: Adapter | None = None,
) -> int:  # fmt: skip
    """The stages after the shards: ground, fine-tune, and, where that came to its end, write the adapter and report; the exit code."""
    device = decoder.embedding.weight.device
    projector = Projector(ProjectorConfig(shards[0].features.shape[2], language=decoder.config.width)).to(device)
    recipe = tuning.Recipe(steps=args.steps, full_steps=args.full_steps, rows=args.rows, seed=args.seed)
    adapters = tuning.Adapters(decoder, recipe.rank, recipe.scale, recipe.seed)
    layer: Callable[..., Tensor] = tuning.layer_forward if args.no_compile else torch.compile(tuning.layer_forward, dynamic=False)
    if started:
        projector.load_state_dict({name: tensor.float() for name, tensor in started.projector.items()})
        adapters.go_on(started.updates)
    else:
        _ground(args, projector, shards, held[0], decoder, tokenizer)
    whole = bool(started) or loop.finetune(decoder, projector, adapters, shards, tokenizer, recipe, args.folder, layer)
    later = few.FewRecipe(steps=args.few_steps, seed=args.seed)
    if not (whole and few.read_few(decoder, projector, adapters, shards, tokenizer, recipe, later, args.folder, layer)):
        print(f"\nstopped; what was learnt is kept in {args.folder}, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    export(args.folder / ADAPTER, projector, adapters)
    _report(decoder, projector, adapters, held, tokenizer, args.evaluate)
    return 0


def _run(args: argparse.Namespace) -> int:
    device, dtype = _device(args.device), getattr(torch, args.dtype)
    _check(args, device)
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    # read now, before hours of drawing
    started = read_adapter(bundle("mini").adapter if args.start == "mini" else Path(args.start)) if args.start else None
    config, state, tokenizer = read_gguf(pull("mini")["language"], torch.float32)
    decoder = Decoder.of(config, {k: v.to(device, dtype) for k, v in state.items()}).requires_grad_(False)
    shards, held, held_robot = _shards(args, _encoder(device, dtype))
    return _train(args, decoder, tokenizer, shards, [held, *([held_robot] if held_robot else [])], started)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages that are not done yet; the exit code. What the user can mend is one line on stderr, without a traceback."""
    args = _arguments(argv)
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last stage or checkpoint", file=sys.stderr)
        return INTERRUPTED
    except MmsdkError as error:
        print(f"train_mini: {error}", file=sys.stderr)
        return 1 if isinstance(error, WeightsError) else 2


if __name__ == "__main__":
    raise SystemExit(main())
