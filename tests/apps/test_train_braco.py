"""Training of braco's coder: the pupil reads the same questions behind fewer tokens, only the coder learns, resuming changes nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers.models import WordLevel
from torch import Tensor

from mmsdk.apps.train_braco import loop
from mmsdk.apps.train_braco.calibrate import apart, directions
from mmsdk.apps.train_braco.distil import Lesson, Lessons, compressed, divergence, on_grid, read, read_beside, score, shorter
from mmsdk.apps.train_braco.loop import Recipe, Teacher, learn, medium
from mmsdk.apps.train_braco.sets import Set, Target, export
from mmsdk.apps.train_mini.features import Sample, Shard, cells_of
from mmsdk.apps.train_mini.finetune import layer_forward
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError
from mmsdk.kv.none import NoCache
from mmsdk.models.mini.family import Mini
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.coder import read_coder
from mmsdk.tokencomp.methods.braco import Braco
from mmsdk.tokencomp.methods.uniform import Uniform
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTConfig

WIDTH, VISION = 24, 10
CONFIG = DecoderConfig(
    vocabulary=300, width=WIDTH, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=400, rope_theta=1e4, tied=True
)
TARGETS = (Target("image", 8, 2), Target("image", 3, 0))


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % 290 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3) for i in ids)

    def spelled(self, id_: int) -> bytes:
        return self.decode([id_]).encode()

    def to_json(self) -> str:
        return tokenizers.Tokenizer(WordLevel({chr(i - 3): i for i in range(3, 293)}, unk_token=" ")).to_json()


@pytest.fixture(scope="module")
def vlm() -> Mini:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    encoder = Encoder(Dinov2(ViT(ViTConfig(width=VISION, layers=1, heads=1, hidden=8, grid=4)).eval()), Preprocess(area=16))
    projector = Projector(ProjectorConfig(VISION, 16, WIDTH)).requires_grad_(False)
    return Mini("tiny", encoder, projector, decoder.requires_grad_(False), Letters(), 400)


def shard() -> Shard:
    things = (Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2), Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2))
    samples = (Sample(Scene(np.zeros((0, 0, 3), np.uint8), things), None),) * 6
    features = torch.randn(6, 16, VISION, generator=torch.Generator().manual_seed(1)).half()
    return Shard(samples, features, torch.full((6,), 16), torch.tensor([[1, 4, 4]] * 4 + [[1, 2, 8]] * 2))


def lessons(vlm: Mini) -> Lessons:
    return Lessons(vlm, [shard()], 2, {"image": 200, "clip": 200})


def sets(vlm: Mini) -> list[Set]:
    generator = torch.Generator().manual_seed(0)
    return [Set(target, lessons(vlm).grids("image"), torch.zeros(WIDTH), 4, generator) for target in TARGETS]


@pytest.fixture(scope="module")
def lesson(vlm: Mini) -> Lesson:
    return lessons(vlm).drawn("image", 0, 0)


def test_a_step_is_of_one_grid_and_comes_again(vlm: Mini) -> None:
    drawn = [lessons(vlm).drawn("image", 0, step) for step in range(12)]
    assert {one.grid for one in drawn} == {(1, 4, 4), (1, 2, 8)}
    again = lessons(vlm).drawn("image", 0, 3)
    assert torch.equal(again.batch.ids, drawn[3].batch.ids) and torch.equal(again.embeddings, drawn[3].embeddings)
    assert [medium(step, {"image", "clip"}) for step in range(6)] == ["image", "image", "clip"] * 2
    assert medium(2, {"image"}) == "image"


@pytest.mark.parametrize("k", [1, 5, 16])
def test_the_pupil_reads_each_question_as_if_it_were_asked_alone(vlm: Mini, lesson: Lesson, k: int) -> None:
    embeddings = torch.randn(2, k, WIDTH, generator=torch.Generator().manual_seed(k))
    batch = shorter(lesson.batch, 16, k)
    found = read(vlm.decoder, batch, embeddings)
    length = batch.ids.shape[1]
    for question in (0, len(batch.kinds) - 1):
        mine = batch.owner == question
        row, last = int(batch.answers[mine][0]) // length, int(batch.answers[mine][-1]) % length
        start = max(i for i in range(k + 1, last + 1) if batch.positions[row, i] == k + 1)
        words = vlm.decoder.embed(batch.ids[row : row + 1, start : last + 1])
        assert Letters().decode(batch.ids[row, start : start + 10].tolist()) == "Question: "
        alone = torch.cat([vlm.decoder.embed(torch.tensor([[1]])), embeddings[row : row + 1], words], dim=1)
        hidden = vlm.decoder(alone, torch.arange(alone.shape[1])[None], NoCache())
        torch.testing.assert_close(found[mine], hidden[0, -int(mine.sum()) :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("counts", [(5, 5), (16, 3), (2, 9, 4)])
def test_pupils_beside_one_another_read_as_each_alone(vlm: Mini, lesson: Lesson, counts: tuple[int, ...]) -> None:
    """Rows of different lengths in one pass, written for training: the decoder's own hidden states, and its gradients."""
    seen = [torch.randn(2, k, WIDTH, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in counts]
    batches = [shorter(lesson.batch, 16, k) for k in counts]
    together = read_beside(vlm.decoder, batches, seen, layer_forward)
    alone = [read(vlm.decoder, *one) for one in zip(batches, seen, strict=True)]
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    probes = [torch.randn(one.shape, generator=torch.Generator().manual_seed(1)) for one in alone]
    gradients = [torch.autograd.grad(sum((a * p).sum() for a, p in zip(outs, probes, strict=True)), seen) for outs in (together, alone)]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_what_the_teacher_says_of_a_batch_is_asked_once(vlm: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the batches come again after as many steps as were asked for."""
    asked, teacher = [], Teacher(vlm, lessons(vlm), Recipe(lessons=3))
    monkeypatch.setattr(loop, "read", lambda decoder, batch, seen: asked.append(batch) or read(decoder, batch, seen))
    for step in range(8):
        lesson, said = teacher("image", step)
        drawn = lessons(vlm).drawn("image", 0, step % 3)
        assert torch.equal(lesson.batch.ids, drawn.batch.ids)
        torch.testing.assert_close(said, read(vlm.decoder, drawn.batch, drawn.embeddings))
    assert len(asked) == 3


def test_divergence_is_the_kl_of_each_question_by_definition(vlm: Mini, lesson: Lesson) -> None:
    batch = lesson.batch
    teacher = read(vlm.decoder, batch, lesson.embeddings)
    assert float(divergence(vlm.decoder, teacher, teacher, batch).abs().max()) < 1e-6
    pupil = teacher.flip(0)
    p, q = (torch.softmax(vlm.decoder.logits(hidden).double(), dim=1) for hidden in (teacher, pupil))
    kl = (p * (p / q).log()).sum(dim=1)
    found = divergence(vlm.decoder, teacher, pupil, batch)
    for question in (0, len(batch.kinds) - 1):
        assert float(found[question]) == pytest.approx(float(kl[batch.owner == question].mean()), rel=1e-3)


def trained(vlm: Mini, folder: Path, *stops: int) -> tuple[dict[str, Tensor], list[Set]]:
    folder.mkdir()
    learned = sets(vlm)
    for stop in stops:
        learned = sets(vlm)
        learn(vlm, lessons(vlm), learned, Recipe(steps=30, rate=2e-2, warmup=2, every=50), folder, stop_after=stop)
    return load_file(folder / "checkpoint.safetensors"), learned


def test_only_the_coder_learns_it_comes_nearer_and_is_read_back(vlm: Mini, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in [*vlm.decoder.state_dict().items(), *vlm.projector.state_dict().items()]}
    _, learned = trained(vlm, tmp_path / "run", 30)
    after = dict([*vlm.decoder.state_dict().items(), *vlm.projector.state_dict().items()])
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    path = tmp_path / "coder.safetensors"
    export(path, "dct", learned, directions(vlm, shard(), most=5), "30 steps")
    coder = read_coder(str(path), torch.device("cpu"))
    assert coder.budgets == "3 tokens of an image, 8 tokens of an image" and coder.width == WIDTH
    for target in TARGETS:
        one = [lambda: lessons(vlm).drawn("image", 1, 5)]
        full, plain, taught = score(vlm, one, [Braco(), Braco(coder=str(path))], target.count)
        assert full.kl == 0.0 and taught.kl < 0.9 * plain.kl
        assert full.questions == plain.questions == taught.questions > 4


def test_what_learned_nothing_is_shipped_as_its_start_alone(vlm: Mini, tmp_path: Path) -> None:
    """Several ways to pool, of which an untrained map adds nothing: read back, tokens are those of the first way alone."""
    path, generator = tmp_path / "coder.safetensors", torch.Generator().manual_seed(0)
    score = torch.randn(WIDTH, generator=generator).half().float()
    start = Set(Target("image", 3, 2, 4), [(1, 4, 4)], score, 6, generator)
    export(path, "dct", [start], {}, "nothing")
    read_back = read_coder(str(path), torch.device("cpu")).sets["image", 3]
    assert read_back.score.shape == (1, WIDTH) and start.score.shape == (4, WIDTH) and path.stat().st_size < 2000
    x = torch.randn(2, 16, WIDTH, generator=generator)
    found, expected = (Braco().code(x, (1, 4, 4), 3, one).tokens for one in (read_back, start.trained()))
    torch.testing.assert_close(found, expected)


def test_a_training_goes_on_from_another_whatever_ways_to_pool_it_adds(vlm: Mini, tmp_path: Path) -> None:
    _, learned = trained(vlm, tmp_path / "run", 5)
    before, generator = learned[0], torch.Generator().manual_seed(5)
    after = Set(Target("image", 8, 2, 3), lessons(vlm).grids("image"), torch.zeros(WIDTH), 4, generator)
    after.go_on(before.trained())
    x = torch.randn(2, 16, WIDTH, generator=generator)
    found, expected = (Braco().code(x, (1, 4, 4), 8, one.trained()).tokens for one in (after, before))
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match="image.8 does not fit"):
        Set(Target("image", 8, 2), lessons(vlm).grids("image"), torch.zeros(WIDTH), 5, generator).go_on(before.trained())


def test_a_resumed_run_ends_where_an_unbroken_one_does(vlm: Mini, tmp_path: Path) -> None:
    whole, _ = trained(vlm, tmp_path / "whole", 4)
    broken, _ = trained(vlm, tmp_path / "broken", 1, 3)
    assert whole.keys() == broken.keys() and any(name.startswith("optimiser") for name in whole)
    for name, value in whole.items():
        torch.testing.assert_close(value, broken[name], atol=1e-6, rtol=1e-5)


def test_directions_keep_more_of_the_tokens_than_as_many_cosines(vlm: Mini) -> None:
    found = directions(vlm, shard(), most=5)
    assert found.keys() == {(1, 4, 4), (1, 2, 8)}
    rows = found[1, 4, 4].double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(5, dtype=torch.float64), atol=1e-5, rtol=0)
    x = torch.stack(vlm.connect([shard().tokens(i) for i in range(4)]))
    kept = (rows.float() @ x).square().sum()
    assert kept > x.square().sum() - Braco(residual=False).code(x, (1, 4, 4), 5, sets(vlm)[1].trained()).missed.sum()


def test_scores_start_higher_on_things_than_elsewhere(vlm: Mini) -> None:
    scene = shard()
    features = scene.features.clone()
    on = [cell for cell, _ in cells_of(scene.samples[0], [1, 4, 4])]
    features[:4, on] += 2.0
    marked = replace(scene, features=features)
    found = apart(vlm, marked, "image", samples=4)
    scores = torch.stack(vlm.connect([marked.tokens(i) for i in range(4)])) @ found
    others = [cell for cell in range(16) if cell not in on]
    assert scores[:, on].mean() > scores[:, others].mean() + 1.0
    assert float(scores[:, others].std()) == pytest.approx(1.0, rel=0.2)
    assert not apart(vlm, marked, "clip").any()


def test_any_method_can_be_compared(vlm: Mini, lesson: Lesson) -> None:
    kept = compressed(lesson, Uniform(), 4)
    (result,) = Uniform()([on_grid(lesson.embeddings[1], lesson.grid)], [Budget(4)])
    assert torch.equal(kept[1], result.tokens.features)
    whole = compressed(replace(lesson), Uniform(), 16)
    assert torch.equal(whole, lesson.embeddings)
