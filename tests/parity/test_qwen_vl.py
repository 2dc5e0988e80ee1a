"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL against transformers' own classes at tiny size, loaded from the folder that `save_pretrained` wrote.

Compared are the scores at every token of a prompt, the places on the three axes, and greedy tokens: for pictures of several sizes, words
between them, clips, batches, and all caches.
"""

import pytest
import torch

from mmsdk.apps.checkpoints.qwen_vl import KINDS, QwenReplica
from mmsdk.apps.checkpoints.seeing import clip, picture, rows_of, says, scores
from mmsdk.models.types import VLM
from mmsdk.prompt import Prompt, Text, Turn

TOKENS = 32
Pair = tuple[QwenReplica, VLM]
pytestmark = pytest.mark.parametrize("pair", KINDS, indirect=True, scope="module")

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


@pytest.mark.parametrize("name", PROMPTS)
def test_scores_and_places_are_those_of_transformers(pair: Pair, name: str) -> None:
    replica, vlm = pair
    (row,) = rows_of(vlm, [PROMPTS[name]], 0)
    assert torch.allclose(scores(vlm, row), replica.logits(PROMPTS[name]), rtol=0, atol=1e-4)
    axes, following = replica.places(PROMPTS[name]) if name != "words" else (row.turns[0], len(row.embeddings))
    assert torch.equal(row.turns[0], axes) and int(row.following[0]) == int(axes[0, -1]) + 1
    # the delta counts from the furthest place of all, which the time of a clip may be; `generate` goes on behind the last word
    assert int(row.following[0]) == following or (replica.kind, name) == ("qwen2_5_vl", "a long clip")


def test_pb_06_each_row_of_a_mixed_batch_says_what_transformers_says_alone(pair: Pair) -> None:
    replica, vlm = pair
    names = ["words", "several", "between words", "a clip and pictures", "a long clip", "a second turn"]
    rows = rows_of(vlm, [PROMPTS[name] for name in names], TOKENS)
    assert says(vlm, rows, TOKENS) == [replica.says(PROMPTS[name], TOKENS) for name in names]
