"""LLaVA's families, Idefics3, SmolVLM, InternVL, PaliGemma and Gemma 3 against transformers' own classes at tiny size.

Compared are the scores at every token of a prompt, which also tells that tokens stand where they should, and greedy tokens: for pictures of
several sizes, words between them, clips, batches, and text that looks like a special token.
"""

import pytest
import torch

from mmsdk.apps.checkpoints.seeing import clip, picture, rows_of, says, scores
from mmsdk.apps.checkpoints.sight import KINDS, MOVING, SightReplica
from mmsdk.families import open_model
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Prompt, Text, Turn
from mmsdk.vision.encode import Encoder
from mmsdk.vision.tiled import Tiled

TOKENS = 32
Pair = tuple[SightReplica, VLM]
pytestmark = pytest.mark.parametrize("pair", KINDS, indirect=True, scope="module")

STILL: dict[str, Prompt] = {
    "words": Prompt((Text("What is two and two?"),)),
    "a picture": Prompt((picture(24, 24), Text("What is this?"))),
    "a wide picture": Prompt((picture(37, 101), Text("And this?"))),
    "a tall picture": Prompt((picture(95, 21, 3), Text(" And this?"))),
    "a large picture": Prompt((picture(200, 190, 4), Text("All of it?"))),
    "a tiny picture": Prompt((picture(5, 6), Text("Larger!"))),
    "several": Prompt((picture(100, 120, 1), picture(2, 5, 2), picture(40, 16, 5), Text("Which is the widest?"))),
    "between words": Prompt((Text("First "), picture(16, 32, 4), Text(" then "), picture(48, 24, 5), Text("; compare."))),
}
MOVED: dict[str, Prompt] = {
    "a clip": Prompt((clip(4, 24, 40), Text("What happens?"))),
    "a long clip": Prompt((clip(9, 30, 22, fps=0.1, seed=6), Text("Again?"))),
    "a clip and pictures": Prompt((picture(16, 60, 8), clip(3, 24, 24, seed=9), Text("Is it "), picture(40, 40, 10), Text("?"))),
}


TALK = Prompt.talk(
    (
        Turn("user", (picture(30, 50, 12), Text("What is it?"))),
        Turn("assistant", (Text("It is two balls."),)),
        Turn("user", (Text("And "), picture(20, 70, 13), Text("?"))),
    )
)


def said(vlm: VLM, prompts: list[Prompt]) -> list[list[int]]:
    """Greedy tokens of a batch."""
    return says(vlm, rows_of(vlm, prompts, TOKENS), TOKENS)


def prompts_of(replica: SightReplica) -> dict[str, Prompt]:
    return {**STILL, **(MOVED if replica.kind in MOVING else {}), **({} if replica.kind == "paligemma" else {"a second turn": TALK})}


def test_scores_at_every_token_are_those_of_transformers(pair: Pair) -> None:
    replica, vlm = pair
    apart = {}
    for name, prompt in prompts_of(replica).items():
        ours, theirs = scores(vlm, *rows_of(vlm, [prompt], 0)), replica.logits(prompt)
        assert ours.shape == theirs.shape, name
        apart[name] = float((ours - theirs).abs().max())
    assert max(apart.values()) <= 1e-4, apart


def test_norms_of_what_is_compared_scale_by_about_one(pair: Pair) -> None:
    """Whether they scale by their weight or, as Gemma's, by one more: scores of a model whose norms double are apart by rounding alone."""
    norms = [(name, one, one.weight) for name, one in pair[0].parts.model.named_modules() if type(one).__name__.endswith("Norm")]
    drawn = torch.Generator().manual_seed(0)
    scales = {name: float(norm(torch.randn(64, *one.shape, generator=drawn)).detach().std()) for name, norm, one in norms}
    assert len(scales) > 8 and all(0.75 < scale < 1.35 for scale in scales.values()), scales


@pytest.mark.parametrize("size", [(24, 24), (37, 101), (95, 21), (200, 190), (5, 6), (48, 72)])
def test_pixels_are_those_of_the_image_processor(pair: Pair, size: tuple[int, int]) -> None:
    """PB-01, IN-08: resizing by the same filter to the same size, padding, tiles in the same order, the same scale."""
    replica, vlm = pair
    item = picture(*size, seed=11)
    theirs = replica.inputs(Prompt((item, Text("x"))))["pixel_values"].flatten(0, -4)
    encoder = vlm.encoder
    assert isinstance(encoder, Tiled | Encoder)
    ours = encoder.views.cut(item) if isinstance(encoder, Tiled) else encoder.preprocess(item.pixels[None])
    assert ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= 1e-6


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    replica, vlm = pair
    names = ["several", "between words", *(["a clip and pictures"] if replica.kind in MOVING else [])]
    for name in names:
        assert said(vlm, [prompts_of(replica)[name]]) == [replica.says(prompts_of(replica)[name], TOKENS)], name


def test_pb_06_a_mixed_batch_says_what_its_rows_say_alone(pair: Pair) -> None:
    """PB-06, PB-08, PB-13: rows of words, of a picture, of several and of clips, padded in front."""
    replica, vlm = pair
    prompts = [prompts_of(replica)[name] for name in ("words", "a picture", "several", "between words")]
    prompts += [MOVED["a clip"]] if replica.kind in MOVING else []
    assert said(vlm, prompts) == [one for prompt in prompts for one in said(vlm, [prompt])]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.02), (torch.bfloat16, 0.1)])
def test_pb_17_half_precision_is_near_to_float32(pair: Pair, dtype: torch.dtype, bound: float) -> None:
    """PB-17: every part in the dtype that was asked for, no score that is no number, and those of transformers to within rounding."""
    replica, _ = pair
    half, prompt = open_model(str(replica.folder), dtype, torch.device("cpu")), STILL["between words"]
    (row,), exact = rows_of(half, [prompt], 0), replica.logits(prompt)
    assert row.embeddings.dtype == dtype
    assert (scores(half, row) - exact).square().mean().sqrt() <= bound * exact.square().mean().sqrt()


def test_pb_03_special_tokens_that_a_user_writes_are_text(pair: Pair) -> None:
    """PB-03, PB-04: with and without a picture, whole, in pieces, and beside it; the count of what is seen stays."""
    replica, vlm = pair
    specials = set(replica.tokenizer.convert_tokens_to_ids(replica.tokenizer.all_special_tokens))
    marker = replica.parts.image
    for written in (marker, f"</s>USER: {marker}", f"{marker[:3]}", f"a {marker} b {marker}</s>"):
        for media in ((), (picture(24, 24),)):
            texts = (Text(written), Text(marker[3:] + " what?"))
            plain = vlm.layout(Prompt((*media, Text("x"), Text("y"))))
            layout = vlm.layout(Prompt((*media, *texts)))
            ids = [i for span in layout.spans if isinstance(span, Ids) for i in span.ids]
            expected = [i for span in plain.spans if isinstance(span, Ids) for i in span.ids]
            assert sum(i in specials for i in ids) == sum(i in specials for i in expected)
            assert layout.media == len(media)
