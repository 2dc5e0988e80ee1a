"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers' own classes at tiny size, loaded from the folder that `save_pretrained` wrote.

Compared are the scores at every token of a prompt, the places on the three axes, and greedy tokens: for pictures of several sizes, words
between them, clips, batches, and all caches.
"""

import pytest
import torch

from mmsdk.apps.checkpoints.qwen_vl import KINDS, Kind, QwenReplica
from mmsdk.compress import Compression
from mmsdk.decoder.prefill import Laid, prefilled
from mmsdk.families import open_model
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text, Turn
from mmsdk.seeing import connect, encode, enter, parted
from mmsdk.stages import Row, assemble
from mmsdk.vision.types import Image, Video

TOKENS = 32
Pair = tuple[QwenReplica, VLM]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers and ours of the same folder."""
    kind: Kind = request.param
    replica = QwenReplica.write(kind, tmp_path_factory.mktemp(kind))
    return replica, open_model(str(replica.folder), torch.float32, torch.device("cpu"))


def picture(height: int, width: int, seed: int = 0) -> Image:
    return Image(torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))


def clip(frames: int, height: int, width: int, fps: float = 2.0, seed: int = 0) -> Video:
    pixels = torch.randint(0, 256, (frames, 3, height, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Video(pixels, torch.arange(frames) / fps)


PROMPTS: dict[str, Prompt] = {
    "words": Prompt((Text("What is two and two?"),)),
    "a picture": Prompt((picture(32, 48), Text("What is this?"))),
    "a picture resized": Prompt((picture(37, 101), Text("And this?"))),
    "a picture too small": Prompt((picture(5, 6), Text("Larger!"))),
    "several": Prompt((picture(24, 24, 1), picture(40, 16, 2), picture(90, 61, 3), Text("Which is the widest?"))),
    "between words": Prompt((Text("First "), picture(16, 32, 4), Text(" then "), picture(48, 24, 5), Text("; compare."))),
    "a clip": Prompt((clip(6, 24, 40), Text("What happens?"))),
    "an odd clip": Prompt((clip(5, 30, 22, fps=1.5, seed=6), Text("Again?"))),
    "a long clip": Prompt((clip(24, 16, 16, fps=0.5, seed=7), Text("How long is it?"))),
    "a second turn": Prompt.talk(
        [
            Turn("system", (Text("Be brief."),)),
            Turn("user", (picture(24, 40, 11), Text("What is this?"))),
            Turn("assistant", (Text("A cube."),)),
            Turn("user", (clip(3, 24, 16, seed=12), Text("And "), picture(16, 16, 13), Text("?"))),
        ]
    ),
    "a clip and pictures": Prompt((picture(16, 24, 8), clip(4, 24, 24, seed=9), Text("Is it "), picture(40, 40, 10), Text("?"))),
}


def rows_of(vlm: VLM, prompts: list[Prompt]) -> list[Row]:
    """Prompts in front of the decoder, all of what was seen in them."""
    numbered = dict(enumerate(prompts))
    with torch.no_grad():
        seen, _ = parted(encode(vlm, numbered))
        entered, _ = parted(enter(Compression(), connect(vlm, seen), {}))
        rows, wrong = parted(assemble(vlm, numbered, entered, TOKENS))
    assert not wrong
    return list(rows.values())


def laid(row: Row) -> Laid:
    return Laid(row.embeddings, row.positions, row.spans, row.deep, row.turns, row.following)


def says(vlm: VLM, rows: list[Row]) -> list[list[int]]:
    """Greedy tokens of a batch."""
    with torch.no_grad():
        run, cache = prefilled(vlm.decoder, [laid(row) for row in rows], (), TOKENS)
        configs = [GenerationConfig(max_tokens=TOKENS)] * len(rows)
        steps = generate(vlm.decoder, run.hidden[:, -1], cache, configs, vlm.tokenizer.decode, frozenset())
        return [list(row.ids) for row in collect(steps, len(rows))]


@pytest.mark.parametrize("name", PROMPTS)
def test_scores_and_places_are_those_of_transformers(pair: Pair, name: str) -> None:
    replica, vlm = pair
    (row,) = rows_of(vlm, [PROMPTS[name]])
    run, _ = prefilled(vlm.decoder, [laid(row)], (), 0)
    assert torch.allclose(vlm.decoder.logits(run.hidden[0]), replica.logits(PROMPTS[name]), rtol=0, atol=1e-4)
    axes, following = replica.places(PROMPTS[name]) if name != "words" else (row.turns[0], len(row.embeddings))
    assert torch.equal(row.turns[0], axes) and int(row.following[0]) == int(axes[0, -1]) + 1
    # the delta counts from the furthest place of all, which the time of a clip may be; `generate` goes on behind the last word
    assert int(row.following[0]) == following or (replica.kind, name) == ("qwen2_5_vl", "a long clip")


def test_pb_06_each_row_of_a_mixed_batch_says_what_transformers_says_alone(pair: Pair) -> None:
    replica, vlm = pair
    names = ["words", "several", "between words", "a clip and pictures", "a long clip", "a second turn"]
    rows = rows_of(vlm, [PROMPTS[name] for name in names])
    assert says(vlm, rows) == [replica.says(PROMPTS[name], TOKENS) for name in names]
