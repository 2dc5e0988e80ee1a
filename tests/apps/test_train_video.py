"""The drawn world against what its sentences say, the judge, and training that goes on where it stood."""

import itertools
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmsdk.apps.interrupts import INTERRUPTED
from mmsdk.apps.train_video import __main__ as program
from mmsdk.apps.train_video import finer, roam
from mmsdk.apps.train_video.judge import open_judge, teach
from mmsdk.apps.train_video.learn import CONFIG, STAGES, Recipe, Stage, begun, loss_of, memory, rate, spoken, stage_of
from mmsdk.apps.train_video.loop import CHECKPOINT, train
from mmsdk.apps.train_video.plain import Plain, attended
from mmsdk.apps.train_video.score import asked, drawn_score, told
from mmsdk.apps.train_video.world import COLOURS, DIRECTIONS, FRAMES, RELATIONS, SHAPES, SIDE, VOCABULARY, Stories, drawn, film
from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.dit import DiT
from mmsdk.diffusion.imagine import open_imaginer
from mmsdk.diffusion.types import Condition, Spot
from mmsdk.diffusion.words import Words
from mmsdk.diffusion.world.door import EXACT
from mmsdk.diffusion.world.memory import Paging, WorldMemory
from mmsdk.diffusion.world.rollout import remember
from mmsdk.errors import InputError
from mmsdk.pipeline import pipeline
from mmsdk.vision.types import Image

SMALL = replace(CONFIG, heads=1, head_dim=12, hidden=16, layers=1, text_width=8, frequencies=8)
RECIPE = Recipe((Stage(8, 2, 2, 1e-2), Stage(16, 3, 1, 1e-2, coarser=0.4, brief=0.4)), warmup=2)


def every_story() -> Stories:
    """One of each: all shapes, directions and relations."""
    kinds = torch.cartesian_prod(torch.arange(len(SHAPES)), torch.arange(len(DIRECTIONS)), torch.arange(len(RELATIONS)))
    shape, direction, relation = kinds.unbind(1)
    colour = torch.arange(len(kinds)) % len(COLOURS)
    alone = (relation == 0) | (relation == RELATIONS.index("by a robot"))
    return Stories(colour, shape, direction, relation, torch.where(alone, len(COLOURS), (colour + 2) % len(COLOURS)))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def middle(clip: Tensor, name: str) -> list[tuple[float, float] | None]:
    """Where the pixels of a colour are in each frame of [3, t, h, w]; none where there are fewer than six of them."""
    wanted = torch.tensor(COLOURS[name]) / 127.5 - 1
    near = (clip - wanted.view(3, 1, 1, 1)).norm(dim=0) < 0.05
    places = [frame.nonzero().double() for frame in near]
    return [None if len(found) < 6 else (float(found[:, 1].mean()), float(found[:, 0].mean())) for found in places]


def test_clips_show_what_their_sentences_say() -> None:
    """Read from the pixels by their colour: which way, whether it is hidden half-way, and what moves on when it is hit."""
    stories = every_story()
    clips = film(stories, 32, seeded())
    assert clips.shape == (len(stories), 3, FRAMES, 32, 32) and clips.abs().max() <= 1
    for number, sentence in enumerate(stories.captions()):
        robot = sentence.startswith("a robot pushes a ")
        colour = sentence.split()[4 if robot else 1]
        step = DIRECTIONS[sentence.split()[-1] if robot else sentence.partition(" moves ")[2].split()[0]]
        thing = middle(clips[number], colour)
        (x, y), (later, lower) = (at for at in (thing[0], thing[-1]) if at is not None)
        assert (later - x) * step[0] + (lower - y) * step[1] > 2 and abs((later - x) * step[1] + (lower - y) * step[0]) < 1, sentence
        box = middle(clips[number], sentence.split()[-2]) if "box" in sentence else []
        hidden = [at is None for at in thing]
        assert any(hidden) == ("behind" in sentence) and not hidden[0] and not hidden[-1], sentence
        if "hits" in sentence:
            moved = max(abs(one - other) for one, other in zip(box[0] or (), box[10] or (), strict=True))
            assert moved > 2 and thing[8] == thing[15], sentence
        elif box:
            assert None not in box and ("in front" in sentence or box[0] == box[15]), sentence


def test_a_robots_arm_stands_still_and_its_hand_goes_with_what_it_pushes() -> None:
    """Read from the pixels of its colour: some of them at the foot in all frames, the nearest ones as near to the thing in all."""
    stories = every_story()
    for number, sentence in enumerate(stories.captions()):
        clip = film(Stories(*(part[number : number + 1] for part in stories.table().unbind(1))), 64, seeded(number))[0]
        arm = (clip - (torch.tensor([126, 132, 146]) / 127.5 - 1).view(3, 1, 1, 1)).norm(dim=0) < 0.02
        assert bool(arm.flatten(1).any(1).all()) == sentence.startswith("a robot"), sentence
        if sentence.startswith("a robot"):
            way = torch.tensor(DIRECTIONS[sentence.split()[-1]])
            foot = 32 - 28 * way + 20 * way.flip(0).abs()
            nearest = []
            for frame, at in zip(arm, middle(clip, sentence.split()[4]), strict=True):
                spots = frame.nonzero().flip(1).double()
                assert at is not None and (spots - foot).norm(dim=1).min() < 4, sentence
                nearest.append(float((spots - torch.tensor(at)).norm(dim=1).min()))
            assert max(nearest) - min(nearest) < 2.5 and min(nearest) > 4 and max(nearest) < 13, (sentence, nearest)


def test_a_coarse_clip_is_a_fine_one_from_afar_and_seeds_repeat() -> None:
    stories = drawn(6, seeded(1))
    fine, coarse, again = (film(stories, side, seeded(2)) for side in (64, 16, 64))
    assert torch.equal(fine, again) and not torch.equal(fine, film(stories, 64, seeded(3)))
    small = torch.nn.functional.avg_pool3d(fine, (1, 4, 4))
    assert (small - coarse).abs().mean() < 0.01 and (small - coarse).abs().max() < 0.7


def test_all_sentences_are_made_of_the_vocabulary() -> None:
    words = {word for text in every_story().captions() for word in text.split()}
    assert words == set(VOCABULARY) >= set("a red ball moves left behind a blue box".split())


def test_steps_are_of_their_stages_and_rates_rise_and_fall() -> None:
    recipe = Recipe()
    assert recipe.steps == sum(stage.steps for stage in STAGES)
    assert stage_of(recipe, STAGES[0].steps - 1) == (STAGES[0], STAGES[0].steps - 1) and stage_of(recipe, STAGES[0].steps) == (STAGES[1], 0)
    rates = [rate(recipe, step) for step in (0, 99, 100, STAGES[0].steps, recipe.steps - 1)]
    assert rates[0] < rates[1] == rates[2] == STAGES[0].rate and rates[3] < STAGES[1].rate and rates[4] < 0.2 * STAGES[2].rate
    with pytest.raises(AssertionError):
        stage_of(recipe, recipe.steps)


def test_a_model_that_does_nothing_predicts_grey_and_the_default_one_is_small_enough_to_ship() -> None:
    model, words = begun(SMALL, 0)
    latents = torch.randn(1, 3, 2, 8, 8, generator=seeded())
    with torch.no_grad():
        velocity = model(latents, torch.tensor([500.0]), words(words.numbers(["a red ball"])))
    torch.testing.assert_close(velocity, latents / 0.5)
    with torch.device("meta"):
        size = sum(part.numel() for module in begun(CONFIG, 0) for part in module.parameters())
    assert 2 * size < 25e6


def test_the_average_of_a_stage_begins_with_it_and_remembers_no_longer_than_the_recipe() -> None:
    recipe = Recipe((Stage(8, 20000, 1, 1e-3), Stage(16, 30, 1, 1e-3)))
    assert [memory(recipe, step) for step in (0, 1, 90)] == [0.1, 2 / 11, 0.91]
    assert memory(recipe, 19999) == recipe.memory and memory(recipe, 20000) == 0.1


class Watched(DiT):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def forward(self, latents: Tensor, time: Tensor, condition: Condition, attend: Plain, *, first: int) -> Tensor:  # type: ignore[override]
        self.asked.append((tuple(latents.shape), first))
        return super().forward(latents, time, condition, attend, first=first)


def test_steps_of_a_stage_have_as_many_tokens_coarse_brief_or_whole() -> None:
    """Of 200 steps; brief ones begin at every frame from which a quarter of them is left."""
    torch.manual_seed(0)
    recipe, model, words = Recipe((Stage(16, 200, 1, 1e-3, 0.25, 0.5),)), Watched(), Words(VOCABULARY, 8, 12)
    with torch.no_grad():
        for step in range(200):
            loss_of(model, words, recipe, step, torch.float32)
    shapes = [shape for shape, _ in model.asked]
    counts = [shapes.count(shape) for shape in ((4, 3, FRAMES, 8, 8), (4, 3, FRAMES // 4, 16, 16), (1, 3, FRAMES, 16, 16))]
    assert sum(counts) == 200 and all(abs(count - most) < 20 for count, most in zip(counts, (50, 100, 50), strict=True))
    assert {first for shape, first in model.asked if shape[2] == FRAMES} == {0}
    assert {first for shape, first in model.asked if shape[2] < FRAMES} == set(range(13))


@pytest.mark.parametrize("tokens", [7, 1024, 1030])
def test_attention_while_training_is_attention_with_its_gradient(tokens: int) -> None:
    """Few tokens and many, all of them or those of a mask."""
    given = [torch.randn(2, 2, length, 8, generator=seeded(length + n), requires_grad=True) for n, length in enumerate((5, tokens, tokens))]
    for mask in (None, torch.rand(2, 1, 5, tokens, generator=seeded()) < 0.5):
        ours, theirs = attended(*given, mask), torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=mask)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for one, other in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (ours, theirs)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def losses(model: DiT, words: Words, recipe: Recipe) -> list[float]:
    with torch.no_grad():
        return [float(loss_of(model, words, recipe, step, torch.float32)) for step in range(8)]


def test_losses_fall_and_are_a_function_of_the_step(tmp_path: Path) -> None:
    recipe = Recipe((Stage(8, 60, 8, 3e-3),), warmup=2)
    model, words = begun(SMALL, 0)
    before, again = (losses(model, words, recipe) for _ in range(2))
    assert before == again and len(set(before)) == 8
    _, learner = train(recipe, tmp_path, torch.float32, SMALL)
    after = losses(learner.model, learner.words, recipe)
    assert sum(after) < 0.8 * sum(before)


def test_a_run_that_is_broken_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, _ = train(RECIPE, tmp_path / "whole", torch.float32, SMALL)
    assert train(RECIPE, tmp_path / "parts", torch.float32, SMALL, stop_after=3)[0] == 3
    assert train(RECIPE, tmp_path / "parts", torch.float32, SMALL)[0] == whole == 5
    one, other = (load_file(tmp_path / name / CHECKPOINT) for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_program_trains_writes_teaches_and_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "teach", lambda path: teach(path, steps=1, rows=1))
    monkeypatch.setattr(program, "CONFIG", SMALL)
    words = [
        "--folder",
        str(tmp_path),
        "--steps",
        "2",
        "0",
        "0",
        "--dtype",
        "float32",
        "--evaluate",
        "1",
        "--sampling",
        "1",
        "--no-compile",
    ]
    assert program.main([*words, "--stop-after", "1"]) == 0 and not (tmp_path / "model").exists()
    assert program.main(words) == 0
    out = capsys.readouterr().out
    assert '"of": "drawn"' in out and '"of": "made"' in out and '"three"' in out and (tmp_path / "clips.png").is_file()
    made = open_imaginer(tmp_path / "model")("a white cross moves up", steps=1)
    assert made.frames.shape == (FRAMES, 3, SIDE, SIDE) and made.cost.passes == 2


def named(sentence: str) -> tuple[int, int]:
    colour, shape = sentence.split()[1:]
    return list(COLOURS).index(colour), SHAPES.index(shape)


def test_a_window_over_a_world_shows_what_lies_there_and_what_left_comes_back() -> None:
    """Places are whole tokens apart, so that what two windows share is the same pixels, moved."""
    lands = roam.settled(3, seeded())
    path = torch.tensor([[0, 1, 1, 2, 2, 3, 4]] * 3)
    clips = roam.seen(lands, roam.steps_of(path), roam.PIXELS)
    assert clips.shape == (3, 3, 7, 32, 32) and clips.abs().max() <= 1
    assert torch.equal(clips[:, :, 0], clips[:, :, 4]) and torch.equal(clips[:, :, 4], clips[:, :, 6])
    torch.testing.assert_close(clips[:, :, 1, :, 8:], clips[:, :, 0, :, :-8])
    torch.testing.assert_close(clips[:, :, 5, 8:], clips[:, :, 0, :-8])
    for number, (sentence, colour) in enumerate(zip(lands.captions(), lands.colour[:, 0].tolist(), strict=True)):
        assert named(sentence) == (colour, int(lands.shape[number, 0])) and set(sentence.split()) <= set(VOCABULARY)
        assert middle(clips[number], list(COLOURS)[colour])[0] is not None


def test_half_of_the_paths_come_back() -> None:
    path = roam.wandered(400, roam.FRAMES, seeded())
    places = roam.steps_of(path)
    again = [len({tuple(place) for place in row.tolist()}) for row in places]
    assert (path[:, 0] == 0).all() and path.max() == 4 and sum(count < roam.FRAMES for count in again) > 300
    assert torch.equal(path, roam.wandered(400, roam.FRAMES, seeded()))


def test_noisy_frames_read_themselves_and_clean_ones_before_them_that_are_not_hidden() -> None:
    """Against one attention over all pairs, masked pair by pair."""
    frames, tokens = 3, 4
    hidden = torch.zeros(2, frames, frames, dtype=torch.bool)
    hidden[1, 2, 0] = True
    reads = torch.zeros(2, 2 * frames, 2 * frames, dtype=torch.bool)
    for row, reader, other in itertools.product(range(2), range(frames), range(frames)):
        earlier = other < reader and not bool(hidden[row, reader, other])
        reads[row, reader, other] = earlier or other == reader
        reads[row, frames + reader, other], reads[row, frames + reader, frames + other] = earlier, other == reader
    mask = reads.repeat_interleave(tokens, 1).repeat_interleave(tokens, 2)[:, None]
    made = [torch.randn(2, 2, 2 * frames * tokens, 8, generator=seeded(seed)) for seed in range(3)]
    spot = Spot(Grid(2 * frames, 2, 2), 0, 1, torch.empty(2, 16, 8))
    expected = torch.nn.functional.scaled_dot_product_attention(*made, attn_mask=mask)
    torch.testing.assert_close(roam.Taught(hidden)(*made, spot), expected, rtol=0, atol=1e-5)


def test_teaching_all_frames_at_once_is_what_the_world_does_frame_by_frame(tmp_path: Path) -> None:
    """The velocity of a noisy frame in the taught sequence is the one that a world's memory gives, with nothing hidden."""
    torch.manual_seed(0)
    model = DiT(replace(roam.ROAMING, heads=1, head_dim=12, hidden=16, layers=2, text_width=8, frequencies=8)).eval()
    text, frames, tokens = torch.randn(1, 4, 8), 4, 64
    places = 2 * roam.steps_of(torch.tensor([[0, 1, 1, 2]]))
    clean, noisy = (torch.randn(1, 3, frames, 32, 32, generator=seeded(seed)) for seed in (1, 2))
    sigma = torch.tensor([[0.9, 0.5, 0.3, 0.7]])
    times = torch.cat((torch.zeros(1, frames), 1000 * sigma), 1).repeat_interleave(tokens, 1)
    with torch.no_grad(), WorldMemory(tmp_path, Paging(sinks=0, recent=9, recalled=0), EXACT) as memory:
        both = torch.cat((clean, noisy), 2)
        taught = model(
            both,
            times,
            Condition(text, places=torch.cat((places, places), 1)),
            roam.Taught(torch.zeros(1, frames, frames, dtype=torch.bool)),
        )[:, :, frames:]
        for frame in range(frames):
            at = Condition(text, places=places[:, frame : frame + 1])
            alone = model(noisy[:, :, frame : frame + 1], 1000 * sigma[:, frame], at, memory.at(0, 1, "cond"), first=frame)
            torch.testing.assert_close(alone, taught[:, :, frame : frame + 1], rtol=0, atol=2e-5)
            remember(model, clean[:, :, frame : frame + 1], at, memory, frame)


def test_the_program_trains_a_world_and_an_upscaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(roam.ROAMING, heads=1, head_dim=12, hidden=16, layers=1, text_width=8, frequencies=8, patch=(1, 8, 8))
    monkeypatch.setattr(program.roam, "ROAMING", small)
    words = ["--kind", "world", "--folder", str(tmp_path), "--steps", "2", "--dtype", "float32", "--no-compile", "--evaluate", "1"]
    assert program.main([*words, "--stop-after", "1"]) == 0 and not (tmp_path / "model").exists()
    assert program.main(words) == 0 and '"of": "returns"' in capsys.readouterr().out
    with pipeline("world-model", tmp_path / "model", dtype="float32") as world:
        world._folder = tmp_path
        assert world.actions == tuple(roam.ACTIONS) and world.reset(text="a red ball").size == (32, 32)
        assert world.step("left").source == "frame 2" and world._place.tolist() == [0.0, -1.0]
        # one so long that resizing it would take gigabytes, of which here nothing is there; the world goes on
        long = Image(torch.zeros(3, 1, 1, dtype=torch.uint8).expand(3, 1, 2**24 + 1), "long.png")
        with pytest.raises(InputError, match=r"^pixels: is 16777217x1, and .* pixels on the way to 32x32"):
            world.reset(first=long)
        assert world.frames == 2
    with pytest.raises(SystemExit):
        program.main(["--kind", "world", "--steps", "1", "2"])
    upscaler = ["--kind", "upscaler", "--folder", str(tmp_path), "--steps", "2"]
    written = tmp_path / "model" / "upscaler.safetensors"
    assert program.main([*upscaler, "--stop-after", "1"]) == 0 and not written.exists()
    assert program.main([*upscaler, "--now", "--evaluate", "0"]) == 0 and written.is_file() and "upscaler" not in capsys.readouterr().out
    written.unlink()
    assert program.main([*upscaler, "--evaluate", "1"]) == 0 and '"steps": 2' in capsys.readouterr().out and written.is_file()


@pytest.mark.parametrize(
    "words",
    [["upscaler", "--dtype", "bfloat16"], ["upscaler", "--no-compile"], ["upscaler", "--sampling", "4"], ["world", "--sampling", "4"]],
)
def test_what_a_kind_does_not_read_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--kind", *words])
    assert f"{words[1]} is not for --kind {words[0]}" in capsys.readouterr().err


def test_an_upscaler_goes_on_where_it_stood_and_ctrl_c_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, before, steps = finer._step, signal.getsignal(signal.SIGINT), list[int]()

    def interrupted(*given: Any) -> None:
        steps.append(len(steps))
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)
        plain(*given)

    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    _, whole = finer.taught(tmp_path / "whole", 6, width=4)
    with monkeypatch.context() as broken:
        broken.setattr(finer, "_step", interrupted)
        assert finer.taught(tmp_path / "parts", 6, width=4)[0] == 2 and signal.getsignal(signal.SIGINT) is before
    assert finer.taught(tmp_path / "parts", 6, stop_after=1, width=4)[0] == 3
    done, parts = finer.taught(tmp_path / "parts", 6, width=4)
    one, other = whole.state_dict(), parts.state_dict()
    assert done == 6 and all(torch.equal(one[name], other[name]) for name in one)
    (tmp_path / "seed").mkdir()
    _, another = finer.taught(tmp_path / "seed", 6, seed=1, width=4)
    assert not torch.equal(another.enter.weight, whole.enter.weight)


def test_an_interrupted_upscaler_is_not_written_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finer, "_step", lambda *_: signal.raise_signal(signal.SIGINT))
    assert program.main(["--kind", "upscaler", "--folder", str(tmp_path), "--steps", "2"]) == INTERRUPTED
    assert "stopped after 1 of 2 steps" in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_an_upscaler_learns_more_than_bilinear(tmp_path: Path) -> None:
    _, upscaler = finer.taught(tmp_path, 40, width=8)
    gained = finer.gained(upscaler, clips=2)
    assert 0 < gained["upscaler"] < gained["bilinear"]


def test_captions_are_dropped_by_the_share_of_the_recipe() -> None:
    captions = [f"a {number}" for number in range(1000)]
    for share in (0.0, roam.RECIPE.dropped, 1.0):
        kept = spoken(captions, share, seeded())
        assert abs(kept.count("") - 1000 * share) < 60 and all(text in ("", caption) for text, caption in zip(kept, captions, strict=True))
    torch.manual_seed(0)
    model = DiT(replace(roam.ROAMING, heads=1, head_dim=12, hidden=16, layers=1, text_width=8, frequencies=8))
    recipe, words = replace(roam.RECIPE, stages=(Stage(16, 1, 1, 1e-3),)), Words(VOCABULARY, 8, 12)
    with torch.no_grad():
        all_told, none_told = (roam.loss_of(model, words, replace(recipe, dropped=share), 0, torch.float32) for share in (0.0, 1.0))
    assert all_told != none_told


def test_a_judge_reads_frames_and_is_held_against_what_was_told(tmp_path: Path) -> None:
    share = teach(tmp_path / "judge.safetensors", steps=2, rows=1)
    judge = open_judge(tmp_path / "judge.safetensors")
    assert 0 <= share <= 1
    stories = asked(3)
    reading = judge.read(film(stories, SIDE, seeded()))
    assert reading.table.shape == (3, 5) and reading.steady.shape == (3, FRAMES)
    assert torch.equal(judge.read(film(stories, SIDE, seeded())).table, reading.table)
    perfect = told(replace(reading, table=stories.table()), stories)
    wrong = told(replace(reading, table=(stories.table() + 1)), stories)
    assert perfect.three == perfect.five == 1.0 and wrong.three == 0.0 and set(perfect.each.values()) == {1.0}
    assert drawn_score(judge, 2).clips == 2
