"""The bench of video: rows of every kind, of a model that was taught nothing, and a run that is broken off and goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmsdk import plugins
from mmsdk.apps.bench import video
from mmsdk.apps.bench.video import Video
from mmsdk.apps.train_video import roam
from mmsdk.apps.train_video.judge import teach
from mmsdk.apps.train_video.world import VOCABULARY
from mmsdk.apps.video import remembering, rows
from mmsdk.apps.video.attention import METHODS, settings
from mmsdk.apps.video.trials import WAYS, Way
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.imagine import Imaginer, Screen, save_imaginer
from mmsdk.diffusion.rotary import Spread, Waves
from mmsdk.diffusion.words import Words
from mmsdk.errors import InputError

SMALL = Video(
    world_frames=40,
    endless=40,
    frames=2,
    height=8,
    width=8,
    heads=1,
    head_dim=16,
    methods="nabla+draft",
    repeats=1,
    wave_tokens=2048,
    wave_heads=2,
)
FEW = [Way("generation"), Way("generation", "nabla"), Way("cache", cache="magcache:0.2"), Way("two_stage", coarse=0.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What training leaves in a folder, of a model that was taught nothing."""
    torch.manual_seed(0)
    at, spread = tmp_path_factory.mktemp("trained"), Spread(8)
    config = DiTConfig(
        3, 3, 1, 12, 16, 1, 8, spread, (1, 8, 8), frequencies=8, order="channels_first", standing=Waves(spread), predicts="clip"
    )
    save_imaginer(at / "model", Imaginer(DiT(config), Words(VOCABULARY, 8, 12), Screen(2, 64, 64, 8.0, 3.0)))
    teach(at / "judge.safetensors", steps=1, rows=1)
    return at


def test_every_kind_has_rows_and_a_run_that_was_broken_off_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "_WAYS", {f"{way.kind} {way.name}": way for way in FEW})
    monkeypatch.setattr(video, "_MASKS", ("nabla",))
    monkeypatch.setattr(remembering, "_untaught", lambda seed: roam.world_of(nobody()))
    bench = replace(SMALL, model=str(folder), clips=1, steps=4, saved=str(tmp_path / "rows.jsonl"))
    # what needs no model may be measured before there is one
    first = replace(bench, kind="attention", model="")()
    found = bench()
    assert found[: len(first)] == first and replace(bench, kind="generation")() == [row for row in found if row["kind"] == "generation"]
    assert {row["kind"] for row in found} == {"attention", "wavealign", "world", "ress", "generation", "cache", "two_stage"}
    assert bench() == found
    for row in found:
        assert set(rows.row("", "", 0)) <= row.keys()
    by = {(str(row["kind"]), str(row["method"])): row for row in found}
    dense = by["generation", "dense"]
    assert (dense["speedup"], dense["rel_l2"], dense["psnr"], dense["skipped"]) == (1.0, 0.0, None, 0.0)
    assert by["generation", "nabla"]["sparsity"] is not None and by["cache", "magcache:0.2"]["agreement"] in (0.0, 1.0)
    assert float(str(by["two_stage", "coarse 0.5"]["rel_l2"])) > 0
    waves = [str(row["method"]) for row in found if row["kind"] == "wavealign"]
    assert {"band", "band, 2 heads abreast", "nabla, on made latents", "nabla, in the model, 1 heads abreast"} <= set(waves)
    assert by["wavealign", "band"]["memory_reads_saved"] == 0.0
    # at equal sparsity, pair by pair
    drifts = [row for row in found if row["kind"] == "ress"]
    ress, mass = ([row["sparsity"] for row in drifts if row["method"] == name] for name in ("ress", "attention mass"))
    assert ress == mass and len(ress) == 4


def test_a_memory_of_worlds_brings_back_what_a_window_of_equal_memory_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted pages by what is known of them; a model that was taught nothing remembers nothing, and has its rows all the same."""
    monkeypatch.setattr(remembering, "_untaught", lambda seed: roam.world_of(nobody()))
    by = {str(row["method"]): row for row in replace(SMALL, kind="world")()}
    assert by["planted pages"]["recall"] == by["planted pages"]["recall_of_gone"] == 1.0
    assert by["planted window"]["recall_of_gone"] == 0.0 and 0 < float(str(by["planted window"]["recall"])) < 0.3
    early, late = (by[f"endless, frames {frames}"] for frames in ("1 to 4", "37 to 40"))
    assert (early["fast_pages"], late["fast_pages"], late["host_pages"]) == (4, 8, 8) and int(str(late["disk_pages"])) >= 24
    roam.save(tmp_path / "model", nobody())
    rows_of = replace(SMALL, kind="world", world=str(tmp_path), clips=1)()
    back = [row for row in rows_of if str(row["method"]).startswith("returns")]
    # it makes grey, which is much worse than bare ground, however long it goes and whatever it reads
    assert len(back) == 4 and all(row["pages_read"] == 7 and row["recall"] == pytest.approx(-7.55, abs=0.1) for row in back)


def nobody() -> Imaginer:
    torch.manual_seed(0)
    config = replace(roam.ROAMING, heads=1, head_dim=12, hidden=16, layers=1, text_width=8, frequencies=8, patch=(1, 8, 8))
    return Imaginer(DiT(config), Words(VOCABULARY, 8, 12))


def test_a_kind_that_needs_a_model_says_so_and_other_settings_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train_video"):
        replace(SMALL, kind="two_stage")()
    saved = str(tmp_path / "rows.jsonl")
    replace(SMALL, kind="attention", saved=saved)()
    with pytest.raises(InputError, match="other settings"):
        replace(SMALL, kind="attention", saved=saved, seed=1)()
    for wrong in (replace(SMALL, clips=0), replace(SMALL, kind="world", world_frames=0)):
        with pytest.raises(InputError, match="at least 1"):
            wrong()
    with pytest.raises(InputError, match="there is no folder"):
        replace(SMALL, saved=str(tmp_path / "none" / "rows.jsonl"))()


def test_all_methods_are_measured_at_two_settings_with_knobs_that_they_have() -> None:
    found = settings("all")
    names = {plugins.parse(setting).name for setting in found if not setting.startswith("random")}
    assert names == set(plugins.available(METHODS)) and len(set(found)) == len(found) == 26
    assert found[:4] == ["random-64", "random-128", "random-64 bfloat16", "random-128 bfloat16"]
    assert all(plugins.load(METHODS, setting) for setting in found if not setting.startswith("random"))
    assert settings("nabla+draft") == ["nabla", "draft"]


def test_ways_have_names_of_their_own_and_numbers_are_those_of_their_formulas() -> None:
    names = [(way.kind, way.name) for way in WAYS]
    assert len(set(names)) == len(names) and ("generation", "dense") in names
    dense = torch.tensor([1.0, -1.0, 0.0])
    assert rows.psnr(dense, dense) is None and rows.psnr(dense + 0.1, dense, 2.0) == pytest.approx(26.0206, abs=1e-3)
    assert rows.rel_l2(dense * 1.5, dense) == pytest.approx(0.5)
