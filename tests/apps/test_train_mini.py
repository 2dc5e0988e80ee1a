"""Training of mini: its pass is the decoder's own, scenes keep what is held out, answers are true, a resumed run is the same run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmsdk.apps.train_mini import finetune as tuning
from mmsdk.apps.train_mini import loop, packing
from mmsdk.apps.train_mini import vocabulary as words
from mmsdk.apps.train_mini.clips import Clip, clip
from mmsdk.apps.train_mini.features import Sample, Shard, build, cells_of, media_of, read
from mmsdk.apps.train_mini.questions import about_scene
from mmsdk.apps.train_mini.questions_clip import about_clip
from mmsdk.apps.train_mini.scenes import Artist, Scene, Thing
from mmsdk.apps.train_mini.wording import COUNTS
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError
from mmsdk.kv.none import NoCache
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import ADAPTER, BOS, EOS, asked
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.vit import ViT, ViTConfig

WIDTH, VISION = 24, 10
CONFIG = DecoderConfig(
    vocabulary=300, width=WIDTH, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=256, rope_theta=1e4, tied=True
)


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % 290 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3) for i in ids)


def tiny_decoder() -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder.requires_grad_(False)


def tiny_shard() -> Shard:
    things = (Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2), Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2))
    scene = Scene(np.zeros((0, 0, 3), np.uint8), things)
    features = torch.randn(4, 16, VISION, generator=torch.Generator().manual_seed(1)).half()
    return Shard((Sample(scene, None),) * 4, features, torch.full((4,), 16), torch.tensor([[1, 4, 4]] * 4))


def tiny_batch(blind: float = 0.0) -> packing.Batch:
    return packing.pack(tiny_shard(), [0, 1], 220, [16, 9], Letters(), np.random.default_rng(0), {}, blind)


def trained(decoder: Decoder) -> tuning.Adapters:
    adapters = tuning.Adapters(decoder, 3, 2.0, 0)
    for b in adapters.b:
        torch.nn.init.normal_(b, std=0.1)
    return adapters


def projector() -> Projector:
    torch.manual_seed(2)
    return Projector(ProjectorConfig(VISION, 16, WIDTH))


def test_the_training_pass_is_that_of_a_decoder_with_the_updates_merged() -> None:
    decoder, batch, eyes = tiny_decoder(), tiny_batch(), projector()
    adapters = trained(decoder)
    found = tuning.forward(decoder, eyes, adapters.cast(torch.float32), batch)

    merged = tiny_decoder()
    for name, a in adapters.tensors().items():
        _, layer, matrix, half = name.split(".")
        if half == "a":
            (weight,) = (w for n, w in merged.layers[int(layer)].named_parameters() if n.split(".")[-2:] == [matrix, "weight"])
            weight += adapters.tensors()[name.removesuffix("a") + "b"] @ a
    x = merged.embed(batch.ids).flatten(0, 1)
    x[batch.visual] = eyes(batch.features, batch.places).detach()
    hidden = merged(x.view(2, -1, WIDTH), batch.positions, NoCache(), batch.mask)
    assert torch.allclose(found, hidden.flatten(0, 1)[batch.answers], atol=1e-4)


def test_gradients_of_the_updates_are_those_of_the_plain_formula() -> None:
    torch.manual_seed(3)
    x, weight, a, b = (torch.randn(s, dtype=torch.float64) for s in ((7, 5), (6, 5), (2, 5), (6, 2)))
    plain = [t.clone().requires_grad_() for t in (x, a, b)]
    ours = [t.clone().requires_grad_() for t in (x, a, b)]
    probe = torch.randn(7, 6, dtype=torch.float64)
    ((plain[0] @ (weight + plain[2] @ plain[1]).T) * probe).sum().backward()
    (tuning._adapted(ours[0], weight, ours[1], ours[2]) * probe).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad)


@pytest.mark.parametrize("blind", [0.0, 1.0])
def test_a_pair_sees_the_pictures_and_itself(blind: float) -> None:
    batch = tiny_batch(blind)
    for row, visual in ((0, 16), (1, 9)):
        seen = batch.mask[row, 0] == 0
        restarts = (batch.positions[row] == visual + 1).nonzero()[:, 0].tolist()
        assert len(restarts) > 2
        for start, end in zip(restarts, [*restarts[1:], None], strict=True):
            for i in range(start, end or start + 1):
                allowed = {0} | (set() if blind else set(range(1, visual + 1))) | set(range(start, i + 1))
                assert set(seen[i].nonzero()[:, 0].tolist()) == allowed


def test_a_part_of_the_picture_shows_every_thing_before_one_of_them_twice() -> None:
    things = (Thing("dog", "", "object", 0.3, 0.3, 1.0, 1.0), Thing("circle", "red", "shape", 0.9, 0.9, 0.1, 0.1))
    sample = Sample(Scene(np.zeros((0, 0, 3), np.uint8), things), None)
    shard = Shard((sample,), torch.zeros(1, 64, VISION).half(), torch.tensor([64]), torch.tensor([[1, 8, 8]]))
    (circle,) = (i for i, thing in cells_of(sample, [1, 8, 8]) if thing.name == "circle")
    picked = [packing.subset(shard, 0, 24, np.random.default_rng(seed)).tolist() for seed in range(200)]
    assert all(len(set(keep)) == 24 and keep == sorted(keep) for keep in picked)
    # by chance alone the circle would be there in three of eight
    assert sum(circle in keep for keep in picked) > 0.85 * len(picked)


def test_robot_scenes_are_described_things_first_as_any_scene_is() -> None:
    things = tuple(Thing(name, "red", "object", x, 0.5, 0.1, 0.1) for name, x in (("robot arm", 0.5), ("mug", 0.1), ("puck", 0.9)))
    asked = about_scene(Scene(np.zeros((0, 0, 3), np.uint8), things, suite="robot"), np.random.default_rng(0))
    (said,) = (qa.answer for qa in asked if qa.type == "caption" and qa.question.startswith("Describe"))
    assert said == "a mug on the left and a puck on the right, on a table with a robot arm"


def test_robot_scenes_are_asked_for_as_many_yes_as_no() -> None:
    things = tuple(Thing(name, "red", "object", 0.5, 0.5, 0.1, 0.1) for name in ("robot arm", "table", "mug", "puck", "drawer"))
    scene = Scene(np.zeros((0, 0, 3), np.uint8), things, suite="robot")
    for seed in range(20):
        asked = [qa for qa in about_scene(scene, np.random.default_rng(seed)) if qa.type == "yes/no"]
        assert [qa.answer for qa in asked].count("yes") == 2 and len(asked) == 4
        absent = {name for qa in asked if qa.answer == "no" for name in ("mug", "puck", "drawer") if f" {name}" in qa.question}
        assert not absent


def test_what_a_word_says_is_asked_as_reading_alone() -> None:
    things = (Thing("TAXI", "black", "word", 0.2, 0.2, 0.2, 0.1), Thing("dog", "", "object", 0.8, 0.8, 0.2, 0.2))
    scene = Scene(np.zeros((0, 0, 3), np.uint8), things)
    for seed in range(20):
        for qa in about_scene(scene, np.random.default_rng(seed)):
            assert (qa.type in ("reading", "caption")) or "TAXI" not in qa.answer
        assert {qa.answer for qa in about_scene(scene, np.random.default_rng(seed)) if qa.type == "reading"} == {"TAXI"}


def test_answers_are_predicted_from_the_token_before_them() -> None:
    batch = tiny_batch()
    assert torch.equal(batch.ids.flatten()[batch.answers + 1], batch.labels)
    ends = [i for i, label in enumerate(batch.labels.tolist()) if label == EOS]
    assert len(ends) == len(batch.kinds) and torch.equal(batch.owner[ends], torch.arange(len(ends)))


def test_a_control_asks_the_same_questions_of_another_picture() -> None:
    shard, letters = tiny_shard(), Letters()
    packed = [
        packing.pack(shard, [0, 1], 220, [16, 16], letters, np.random.default_rng(0), {}, 0.0, seen) for seen in (None, [0, 1], [1, 2])
    ]
    assert torch.equal(packed[0].ids, packed[1].ids) and torch.equal(packed[0].features, packed[1].features)
    assert torch.equal(packed[0].ids, packed[2].ids) and torch.equal(packed[2].features[:16], shard.features[1].float())


def eyes() -> Encoder:
    torch.manual_seed(4)
    vit = ViT(ViTConfig(width=32, layers=2, heads=2, hidden=64, grid=4)).eval().requires_grad_(False)
    return Encoder(Dinov2(vit, (0,)), Preprocess(area=16))


def seen() -> list[Scene | Clip]:
    """Two pictures of unlike shapes, a clip that has more tokens than either, and a picture again."""
    rng = np.random.default_rng(0)
    pictures = [Scene(rng.integers(0, 256, (*size, 3), dtype=np.uint8), (), "red") for size in ((56, 56), (28, 84), (56, 56))]
    clip = Clip(rng.integers(0, 256, (6, 56, 56, 3), dtype=np.uint8), (), "robot", "push")
    return [*pictures[:2], clip, pictures[2]]


def test_a_shard_is_what_the_encoder_sees_mapped_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    shard = build(path, iter(seen()), 4, eyes(), origin="here", batch=100)
    tokens = eyes()([media_of(item) for item in seen()])
    assert shard.counts.tolist() == [len(t) for t in tokens] == [16, 12, 24, 16]
    assert shard.grids.tolist() == [list(t.grid) for t in tokens] and shard.features.shape == (4, 24, 64)
    for row, t in zip(shard.features, tokens, strict=True):
        assert torch.equal(row[: len(t)], t.features.half()) and not row[len(t) :].any()
    assert [s.clip is None for s in shard.samples] == [True, True, False, True] and shard.samples[0].scene.background == "red"
    assert {name: t.dtype for name, t in load_file(path).items()} == {
        "features": torch.float16, "counts": torch.int64, "grids": torch.int64,
    }  # fmt: skip
    # in the page cache alone, however large it is
    assert str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("total", [1, 4, 9])
def test_a_wrong_announcement_costs_time_and_no_row(tmp_path: Path, total: int) -> None:
    expected = build(tmp_path / "a.safetensors", iter(seen()), 4, eyes(), origin="here", batch=1)
    found = build(tmp_path / "b.safetensors", iter(seen()), total, eyes(), origin="here", batch=1)
    assert torch.equal(found.features, expected.features) and torch.equal(found.counts, expected.counts)


def never() -> Iterator[Scene | Clip]:
    raise AssertionError("drawn again")
    yield


def test_a_shard_is_used_again_for_what_it_was_made_from_alone(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    made = build(path, iter(seen()), 4, eyes(), origin="seed 0: 4 samples")
    again = build(path, never(), 4, eyes(), origin="seed 0: 4 samples")
    assert torch.equal(made.features, again.features) and [s.scene is None for s in again.samples] == [False, False, True, False]
    for origin in ("seed 1: 4 samples", "seed 0: 5 samples"):
        with pytest.raises(
            InputError, match=f"made from seed 0: 4 samples, this run is about {origin}; remove it or choose another folder"
        ):
            build(path, never(), 4, eyes(), origin=origin)
    assert path.exists()


def test_a_shard_that_does_not_say_what_it_was_made_from_is_used_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "shard.safetensors"
    made = build(path, iter(seen()), 4, eyes(), origin="here")
    save_file({name: tensor.clone() for name, tensor in load_file(path).items()}, tmp_path / "bare")
    (tmp_path / "bare").replace(path)
    with pytest.warns(UserWarning, match="does not say what it was made from"):
        assert torch.equal(build(path, never(), 4, eyes(), origin="here").features, made.features)
    path.with_suffix(".json").write_text("[]")
    with pytest.warns(UserWarning, match="does not say"), pytest.raises(InputError, match=r"has 4 rows, shard\.json describes 0"):
        build(path, never(), 4, eyes(), origin="here")


def test_a_shard_of_an_earlier_day_is_read_whatever_else_its_notes_say(tmp_path: Path) -> None:
    path, notes = tmp_path / "shard.safetensors", tmp_path / "shard.json"
    made = build(path, iter(seen()), 4, eyes(), origin="here")
    old = json.loads(notes.read_text())
    old[0]["scene"]["extra"] = {}
    notes.write_text(json.dumps(old))
    found = read(path)
    assert torch.equal(found.features, made.features)
    assert found.samples[0].scene.background == made.samples[0].scene.background == "red"
    del old[1]["scene"]["things"]
    notes.write_text(json.dumps(old))
    with pytest.raises(InputError, match=r"shard\.json: does not describe samples \(KeyError\('things'\)\); remove it and shard\.saf"):
        read(path)


def test_missing_fonts_are_told_before_anything_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_DIRS", "XDG_DATA_HOME"):  # where else Pillow looks
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(InputError, match=r"DejaVuSans-Bold\.ttf.*apt install fonts-dejavu-core"):
        Artist(tmp_path, tmp_path, fonts=tmp_path)


def test_training_asks_in_the_words_of_the_model() -> None:
    batch = tiny_batch()
    assert batch.ids[:, 0].tolist() == [BOS, BOS] and (BOS, EOS) == (1, 2)
    question = b"Question: "
    starts = (batch.positions[0] == 17).nonzero()[:, 0].tolist()
    assert all(batch.ids[0, start : start + len(question)].tolist() == [3 + c for c in question] for start in starts)
    assert asked("Is it red?") == "Question: Is it red?\nAnswer:"
    assert ADAPTER == "mini_adapter.safetensors"


def run(folder: Path, *stops: int) -> dict[str, Tensor]:
    folder.mkdir()
    recipe = tuning.Recipe(steps=4, scene_steps=2, full_steps=1, rows=2, length=200, room=200, rank=2, warmup=2)
    for stop in stops:
        decoder = tiny_decoder()
        loop.finetune(decoder, projector(), tuning.Adapters(decoder, 2, 2.0, 0), [tiny_shard()], Letters(), recipe, folder, stop_after=stop)
    return load_file(folder / "checkpoint.safetensors")


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    whole, broken = run(tmp_path / "whole", 4), run(tmp_path / "broken", 1, 3)
    assert whole.keys() == broken.keys() and int(whole["optimiser.0.step"]) == 4
    for name, value in whole.items():
        assert torch.allclose(value, broken[name], atol=1e-6), name


def test_nothing_is_drawn_that_nothing_can_be_asked_about() -> None:
    shard = tiny_shard()
    mute = Sample(Scene(np.zeros((0, 0, 3), np.uint8), (Thing("robot arm", "red", "object", 0.5, 0.5, 0.2, 0.2),), suite="robot"), None)
    mixture = loop.Mixture(
        [
            replace(
                shard,
                samples=(
                    mute,
                    *shard.samples[1:],
                ),
            )
        ]
    )
    assert mixture.rows == {"scene": [(0, 1), (0, 2), (0, 3)]}


def test_half_of_what_is_claimed_of_a_motion_is_true(artists: tuple[Artist, Artist]) -> None:
    answers = []
    for i in range(60):
        moving = clip(artists[0], np.random.default_rng(i))
        ways = {actor.thing.name: actor.motion for actor in moving.actors}
        for qa in about_clip(moving, np.random.default_rng(i)):
            name, _, way = qa.question.removeprefix("Does the ").removesuffix("?").partition(" move ")
            if name in ways and way:
                assert qa.answer == ("yes" if ways[name] == way else "no")
                answers.append(qa.answer)
    assert len(answers) > 20 and 0.3 < answers.count("yes") / len(answers) < 0.7


@pytest.fixture(scope="module")
def artists(emoji: Path, photos: Path) -> tuple[Artist, Artist]:
    return Artist(emoji, photos), Artist(emoji, photos, held_out=True)


def test_scenes_are_their_seed(artists: tuple[Artist, Artist]) -> None:
    first, second = (artists[0].scene(np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first.pixels, second.pixels) and first.things == second.things


def test_training_scenes_show_nothing_that_is_held_out(artists: tuple[Artist, Artist]) -> None:
    train, held = ([artist.scene(np.random.default_rng(i)) for i in range(150)] for artist in artists)

    def rare(scenes: list[Scene]) -> int:
        shapes = sum((t.colour, t.name) in words.HELD_OUT_SHAPES for s in scenes for t in s.things if t.kind == "shape")
        drawn = [[t.name for t in s.things if t.kind == "object"] for s in scenes]
        return shapes + sum(words.held_out_pair(a, b) for names in drawn for a in names for b in names if a < b)

    assert rare(train) == 0 < rare(held)
    assert not artists[0].photos.keys() & artists[1].photos.keys()


def test_answers_about_scenes_are_true(artists: tuple[Artist, Artist]) -> None:
    asked = 0
    for i in range(60):
        scene = artists[0].scene(np.random.default_rng(i))
        names = [t.name for t in scene.things]
        for qa in about_scene(scene, np.random.default_rng(i)):
            if qa.type == "place":
                fits = [t for t in scene.things if t.name in qa.question or t.kind in qa.question]
                row, column = ("top", "", "bottom"), ("left", "", "right")
                places = {f"{row[int(3 * t.y)]} {column[int(3 * t.x)]}".strip() or "centre" for t in fits}
                assert qa.answer in places, qa
                asked += 1
            if qa.type == "reading":
                assert qa.answer in names and qa.answer in (*words.WORDS, *words.NUMBERS)
            if qa.type == "count":
                assert COUNTS.index(qa.answer) <= len(names)
    assert asked > 50


def test_directions_are_those_of_the_pixels(artists: tuple[Artist, Artist]) -> None:
    asked = 0
    for i in range(40):
        moving = clip(artists[0], np.random.default_rng(i))
        if moving.story != "motion" or len(moving.actors) != 1:
            continue
        frames = moving.frames.astype(int)
        still = np.median(frames, axis=0)
        centres = [np.argwhere(np.abs(frame - still).sum(2) > 60).mean(0) for frame in (frames[0], frames[-1])]
        down, right = centres[1] - centres[0]
        seen = ("right" if right > 0 else "left") if abs(right) > abs(down) else ("down" if down > 0 else "up")
        answers = {qa.answer for qa in about_clip(moving, np.random.default_rng(i)) if qa.type == "direction"}
        assert answers == {seen}
        asked += 1
    assert asked >= 3


def test_a_scene_without_its_pixels_is_asked_the_same(artists: tuple[Artist, Artist]) -> None:
    scene = artists[0].scene(np.random.default_rng(1))
    bare = Sample(replace(scene, pixels=np.zeros((0, 0, 3), np.uint8)), None)
    assert bare.questions(np.random.default_rng(2)) == about_scene(scene, np.random.default_rng(2))
