"""A folder's model makes clips of sentences: what was written is read, sizes stand at the same places, words are known or not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmsdk.diffusion.attention.types import Grid
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.imagine import Imaginer, Screen, open_imaginer, pixels, save_imaginer
from mmsdk.diffusion.rotary import ByAxis, Spread, Waves, turned
from mmsdk.diffusion.types import Condition
from mmsdk.diffusion.words import Words
from mmsdk.errors import InputError, ModelError, WeightsError

SPREAD = Spread(4)
CONFIG = DiTConfig(
    3, 3, 1, 12, hidden=16, layers=1, text_width=8, rotary=SPREAD, patch=(1, 2, 2), frequencies=8, order="channels_first",
    standing=Waves(SPREAD), predicts="clip",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def imagine() -> Imaginer:
    torch.manual_seed(0)
    model = DiT(CONFIG).eval().requires_grad_(False)
    return Imaginer(model, Words(("a", "ball", "red"), 8, 4).requires_grad_(False), Screen(2, 8, 8, 4.0, 3.0), 2.0)


def test_what_is_written_is_read_and_makes_the_same_clip(imagine: Imaginer, tmp_path: Path) -> None:
    save_imaginer(tmp_path, imagine, torch.float32)
    again = open_imaginer(tmp_path)
    assert (again.screen, again.scale, again.words.vocabulary, again.model.config) == (
        imagine.screen,
        imagine.scale,
        imagine.words.vocabulary,
        imagine.model.config,
    )
    one, other = (made("A red ball.", seed=3, steps=3) for made in (imagine, again))
    assert torch.equal(one.latents, other.latents) and one.frames.shape == (2, 3, 8, 8)
    assert one.times.tolist() == [0.0, 0.25] and one.cost.passes == 6
    assert not list(tmp_path.glob("*.part"))
    save_imaginer(tmp_path / "half", imagine)
    assert open_imaginer(tmp_path / "half", torch.bfloat16)("ball", steps=1).latents.dtype == torch.bfloat16


def test_seeds_sentences_and_guidance_matter_and_runs_repeat(imagine: Imaginer) -> None:
    plain = imagine("a red ball", steps=2).latents
    assert torch.equal(plain, imagine("a red ball", steps=2).latents)
    for other in (imagine("a red ball", steps=2, seed=1), imagine("a ball", steps=2), imagine("a red ball", steps=2, scale=1.0)):
        assert not torch.equal(plain, other.latents)


def test_coarse_steps_sparse_attention_and_caches_go_together(imagine: Imaginer) -> None:
    told: list[int] = []
    fast = imagine("a ball", steps=4, coarse=2, attention="nabla:mass=1.0", cache="taylorseer:2,warm=1", advance=told.append)
    assert fast.latents.isfinite().all() and told == [1, 2, 3, 4] and fast.cost.tokens < imagine("a ball", steps=4).cost.tokens
    with pytest.raises(InputError, match="at least one is taken at the full size"):
        imagine("a ball", steps=4, coarse=4)


def test_a_coarse_grid_stands_where_the_fine_one_does() -> None:
    """The middle of a row of half as many is the mean of the two rows that it covers."""
    _, fine, _ = SPREAD.places(Grid(1, 8, 8))
    _, coarse, _ = SPREAD.places(Grid(1, 4, 4))
    torch.testing.assert_close(fine.view(4, 2).mean(1), coarse)
    torch.testing.assert_close(coarse, torch.arange(4.0, dtype=torch.float64))
    own = Grid(2, 4, 4)
    for one, other in zip(SPREAD(own, 1, 12, CPU, 3), ByAxis(100.0)(own, 1, 12, CPU, 3), strict=True):
        torch.testing.assert_close(one, other)
    waves = Waves(SPREAD)(own, 20, CPU, first=1)
    assert waves.shape == (32, 20) and len(waves.unique(dim=0)) == 32 and (waves[:, 18:] == 0).all()
    assert torch.equal(waves[:16], Waves(SPREAD)(Grid(1, 4, 4), 20, CPU, first=1))


def test_turning_by_hand_is_that_of_the_angles() -> None:
    """Rotary positions as complex numbers, one pair after another."""
    grid, x = Grid(2, 2, 3), torch.randn(1, 12, 2, 20, generator=torch.Generator().manual_seed(0))
    got = turned(x, ByAxis(50.0)(grid, 2, 20, CPU, first=5))
    pairs = torch.view_as_complex(x.view(1, 12, 2, 10, 2))
    for token in range(12):
        place = (5 + token // 6, token // 3 % 2, token % 3)
        widths = (4, 3, 3)
        angles = [at * 50.0 ** (-i / wide) for at, wide in zip(place, widths, strict=True) for i in range(wide)]
        expected = torch.view_as_real(pairs[:, token] * torch.polar(torch.ones(10), torch.tensor(angles)))
        torch.testing.assert_close(got[:, token], expected.flatten(-2), rtol=0, atol=1e-5)


def test_a_predicted_clip_gives_the_velocity_that_leads_to_it() -> None:
    """With one time for all and one for each token; a step of the whole sigma ends in the clip that is predicted."""
    torch.manual_seed(1)
    clean, plain = DiT(CONFIG).eval(), DiT(replace(CONFIG, predicts="velocity")).eval()
    plain.load_state_dict(clean.state_dict())
    latents, text = torch.randn(1, 3, 2, 8, 8), Condition(torch.randn(1, 4, 8))
    with torch.no_grad():
        for time in (torch.tensor([400.0]), torch.full((1, 32), 400.0)):
            velocity, clip = (model(latents, time, text) for model in (clean, plain))
            torch.testing.assert_close(latents - 0.4 * velocity, clip, rtol=0, atol=1e-5)


def test_words_that_are_not_known_and_texts_that_are_too_long_are_told(imagine: Imaginer) -> None:
    with pytest.raises(InputError, match="did you mean 'ball'") as error:
        imagine("a red bal")
    assert error.value.item == "a red bal" and "a ball red" in str(error.value)
    with pytest.raises(InputError, match="5 words; the model reads 4"):
        imagine("a a a a a")
    with pytest.raises(InputError, match="item 2"):
        imagine.words.numbers(["a ball", "blue"])
    assert imagine.words.numbers([""]).tolist() == [[0, 0, 0, 0]]


def test_folders_of_something_else_and_damaged_ones_are_refused(imagine: Imaginer, tmp_path: Path) -> None:
    save_imaginer(tmp_path, imagine)
    words = load_file(tmp_path / "words.safetensors")
    save_file(words | {"places": torch.zeros(2, 2)}, tmp_path / "words.safetensors")
    with pytest.raises(ModelError, match="places is"):
        open_imaginer(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    with pytest.raises(ModelError, match="brings its words"):
        open_imaginer(tmp_path)
    with pytest.raises(WeightsError):
        open_imaginer(tmp_path / "none")


def test_pixels_are_cut_at_both_ends() -> None:
    clip = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).view(1, 1, 1, 5)
    assert pixels(clip).flatten().tolist() == [0, 0, 128, 255, 255]
