"""A step inside the encoder that finds its own amount, in a pipeline of real parts, small ones; and the same step with a budget."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmsdk.answer import Answer
from mmsdk.compress import compression
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import BudgetError, InputError, ModelError, PluginError
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.pipeline import Pipeline
from mmsdk.tokencomp.actor import Actor, ActorConfig
from mmsdk.tokenizer import TextTokenizer
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.types import Image, Media, Video
from mmsdk.vision.vit import ViT, ViTConfig
from mmsdk.weights.gguf_file import read_file
from mmsdk.weights.gguf_tokenizer import tokenizer_of

WIDTH, DEPTH = 32, 5


def picture(seed: int, height: int = 56, width: int = 56) -> Image:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(3, height, width, generator=generator) * torch.randint(5, 250, (3, 1, 1), generator=generator)
    return Image(noise.to(torch.uint8), f"picture {seed}")


def clip(seed: int, frames: int = 4) -> Video:
    pixels = torch.stack([picture(100 * seed + i).pixels for i in range(frames)])
    return Video(pixels, torch.arange(frames) * 0.5, f"clip {seed}")


@pytest.fixture(scope="module")
def pipe(mini_language: Path) -> Pipeline:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=WIDTH, layers=DEPTH, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    sizes = {"width": 48, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 12, "inner": 96, "context": 512}
    decoder = Decoder(DecoderConfig(vocabulary=49152, **sizes)).eval().requires_grad_(False)
    torch.nn.init.normal_(decoder.embedding.weight)
    torch.nn.init.normal_(decoder.head.weight, std=0.5)
    projector = Projector(ProjectorConfig(vision=WIDTH, hidden=32, language=48)).eval().requires_grad_(False)
    tokenizer = tokenizer_of(read_file(mini_language).metadata)
    assert isinstance(tokenizer, TextTokenizer)
    return Pipeline(Mini("small", Encoder(Dinov2(vit), Preprocess(area=16)), projector, decoder, tokenizer, context=512))


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An actor of random weights that mostly prunes, as one writes it: dora:actor=..."""
    torch.manual_seed(1)
    actor = Actor(ActorConfig(WIDTH, DEPTH, hidden=16))
    for part in (actor.gate, actor.count, actor.rank):
        torch.nn.init.normal_(part.weight, std=2.0)
    path = tmp_path_factory.mktemp("actor") / "actor.safetensors"
    facts = {"width": str(WIDTH), "depth": str(DEPTH), "hidden": "16", "drop": "1.0", "blocks": ",".join(map(str, actor.config.blocks))}
    save_file({k: v.contiguous() for k, v in actor.state_dict().items()}, path, metadata=facts)
    return f"actor={path},least=2"


ITEMS: list[tuple[Media | list[Media], str]] = [
    (picture(0), "What is it?"),
    ([picture(1), picture(2, 28, 84), picture(3)], "Which of them is the larger one?"),
    (clip(4), "What happens?"),
    ([], "What is two and two?"),
    ([picture(5, 28, 14), clip(6), picture(7)], "Which?"),
]


@pytest.mark.parametrize("spec", ["dora:{}", "dora:0.5,{}"])
def test_a_mixed_batch_equals_its_rows_alone_and_again(pipe: Pipeline, dora: str, spec: str) -> None:
    """PP-05, PP-12: rows whose pictures are left with different numbers of tokens, with the cache on, whatever shares the batch."""
    spec = spec.format(dora)
    together = pipe(ITEMS, max_tokens=6, compress=spec)
    kept = set[int]()
    for (media, question), answer, again in zip(ITEMS, together, pipe(ITEMS, max_tokens=6, compress=spec), strict=True):
        alone = pipe(media, question, max_tokens=6, compress=spec)
        assert isinstance(answer, Answer) and answer == again == alone and answer.tokens == alone.tokens
        words = len(pipe.vlm.tokenizer.encode(f"Question: {question}\nAnswer:"))
        assert answer.tokens.prompt == 1 + words + answer.tokens.kept, "PP-09: what is gone is not in the prompt"
        for sight, other in zip(answer.sights, alone.sights, strict=True):
            assert torch.equal(sight.audit.assignment, other.audit.assignment) and sight.audit.method == "dora"
            assert len(sight.saliency) == len(sight.audit.assignment) == len(sight.audit.scores) == len(sight.positions)
            assert torch.equal(sight.audit.scores == 1, sight.audit.assignment >= 0)
            kept.add(int(sight.audit.assignment.max()) + 1)
    assert len(kept) > 1, "an adaptive step would leave different numbers; a share does of different inputs"


def test_an_amount_is_exact_and_none_is_the_actors(pipe: Pipeline, dora: str) -> None:
    pictures = [(picture(seed), "What?") for seed in range(6)]
    exact = pipe(pictures, max_tokens=1, compress=f"dora:7,{dora}")
    assert [answer.tokens.kept for answer in exact] == [7] * 6
    adaptive = pipe(pictures, max_tokens=1, compress=f"dora:{dora}")
    assert len({answer.tokens.kept for answer in adaptive}) > 1 and all(2 <= answer.tokens.kept <= 16 for answer in adaptive)
    assert [answer.tokens.visual for answer in adaptive] == [16] * 6
    whole = pipe(pictures, max_tokens=1, compress=f"dora:1.0,{dora}")
    assert list(whole) == list(pipe(pictures, max_tokens=1)), "PP-09: everything kept is the baseline"


def test_a_clip_never_ends_with_more_than_it_has_pooled(pipe: Pipeline, dora: str) -> None:
    """Four frames of 16 patches are 16 tokens when pooled: pruned instead of pooled, they are at most as many."""
    answer = pipe(clip(4), "What happens?", max_tokens=1, compress=f"dora:{dora}")
    assert answer.tokens.visual == 16 and 8 <= answer.tokens.kept <= 16
    (sight,) = answer.sights
    assert sight.grid == (4, 4, 4) and len(sight.audit.assignment) == 64


def test_later_steps_take_their_share_of_what_is_left(pipe: Pipeline, dora: str) -> None:
    first = pipe(picture(0), "What?", max_tokens=1, compress=f"dora:{dora}").tokens.kept
    answer = pipe(picture(0), "What?", max_tokens=1, compress=[f"dora:{dora}", "uniform:0.5"])
    assert answer.tokens.kept == max(1, int(first / 2 + 0.5)) and answer.sights[0].audit.method == "dora+uniform"


def test_a_budget_that_does_not_fit_is_that_rows_error(pipe: Pipeline, dora: str) -> None:
    good, short = pipe([(picture(0), "What?"), (clip(1), "What?")], max_tokens=1, compress=f"dora:3,{dora}")
    assert isinstance(short, BudgetError) and "each of 4 frames" in str(short) and isinstance(good, Answer) and good.tokens.kept == 3


def test_what_was_encoded_before_and_another_transformer_are_told(pipe: Pipeline, dora: str) -> None:
    with pytest.raises(InputError, match="dora works inside the encoder"):
        pipe(pipe.encode(picture(0)), "What?", compress=f"dora:{dora}")
    with pytest.raises(ModelError, match="trained for vision transformers 384 wide"):
        pipe(picture(0), "What?", compress="dora")


def test_what_is_written_is_what_is_built() -> None:
    assert compression("dora").steps[0].amount == compression("dora:adaptive,least=4").steps[0].amount == "adaptive"
    assert compression("dora:0.5").steps[0].amount == 0.5 and compression("dora").steps[0].budget(9).count == 9
    assert compression(["dora", "uniform:0.5"]).inside_encoder[0].amount == "adaptive"
    assert compression(["dora:0.5", "uniform:auto@prefill<80ms"]).aimed == (1,) and compression("dora:auto@prefill<80ms").aimed == (0,)


def test_orders_and_amounts_that_cannot_be_are_refused() -> None:
    with pytest.raises(BudgetError, match="counts known beforehand; give each of dora"):
        compression(["dora", "uniform:auto@prefill<80ms"])
    with pytest.raises(PluginError, match="in this order"):
        compression(["uniform:0.5", "dora"])
    with pytest.raises(PluginError, match="only one method can work inside the encoder"):
        compression(["tome:0.5", "dora"])
    for text, told in (
        ("dora:0", "at least one|outside"),
        ("dora:1.5", "outside"),
        ("uniform:adaptive", "no number"),
        ("tome", "how much"),
    ):
        with pytest.raises(BudgetError, match=told):
            compression(text)
