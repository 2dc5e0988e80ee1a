"""Stage 2 of mini's training: what it shows is what compressors leave, it goes on from an adapter, and a broken run ends as a whole one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmsdk.apps.train_mini import __main__ as program
from mmsdk.apps.train_mini import few, loop
from mmsdk.apps.train_mini import finetune as tuning
from mmsdk.apps.train_mini.features import Sample, Shard
from mmsdk.apps.train_mini.scenes import Scene, Thing
from mmsdk.decoder.transformer import Decoder, DecoderConfig
from mmsdk.errors import InputError
from mmsdk.models.mini.adapter import read_adapter
from mmsdk.models.mini.projector import Projector, ProjectorConfig
from mmsdk.models.mini.words import ADAPTER
from mmsdk.tokencomp.budget import Budget
from mmsdk.tokencomp.methods.simplecluster import SimpleCluster
from mmsdk.weights import bundle

WIDTH, VISION = 24, 10
CONFIG = DecoderConfig(
    vocabulary=300, width=WIDTH, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=512, rope_theta=1e4, tied=True
)
MANY = tuning.Recipe(steps=2, scene_steps=1, full_steps=1, rows=1, length=200, rank=2, warmup=1)


class Letters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % 290 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 3) for i in ids)


def shard(width: int = VISION) -> Shard:
    things = (Thing("dog", "", "object", 0.2, 0.2, 0.2, 0.2), Thing("circle", "red", "shape", 0.8, 0.8, 0.2, 0.2))
    sample = Sample(Scene(np.zeros((0, 0, 3), np.uint8), things), None)
    features = torch.randn(4, 256, width, generator=torch.Generator().manual_seed(1)).half()
    return Shard((sample,) * 4, features, torch.full((4,), 256), torch.tensor([[1, 16, 16]] * 4))


def parts() -> tuple[Decoder, Projector, tuning.Adapters]:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    decoder.requires_grad_(False)
    return decoder, Projector(ProjectorConfig(VISION, 16, WIDTH)), tuning.Adapters(decoder, 2, 2.0, 0)


@pytest.fixture
def without_braco(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coder is made for mini's embeddings, which are wider than these."""
    monkeypatch.setattr(few, "WAYS", {"things": 0.3, "random": 0.2, "uniform": 0.1, "divprune": 0.1, "simplecluster": 0.3})


@torch.no_grad()
def test_what_is_shown_is_what_a_method_leaves_of_the_projectors_embeddings() -> None:
    _, projector, _ = parts()
    tokens = shard().tokens(2)
    embedded = replace(tokens, features=projector.connect([tokens])[0])
    (expected,) = SimpleCluster()([embedded], [Budget(7)])
    found = few.shorten(projector, shard(), 2, 7, "simplecluster", np.random.default_rng(0))
    assert torch.equal(found, expected.tokens.features)
    for way in ("things", "random", "uniform", "divprune"):
        chosen = few.shorten(projector, shard(), 2, 7, way, np.random.default_rng(0))
        # tokens on things are projected alone, and sums may come out otherwise in other company
        distance = (chosen[:, None] - embedded.features).abs().amax(dim=2).amin(dim=1)
        assert len(chosen) == 7 and float(distance.max()) < 1e-4, way


@torch.no_grad()
def test_bracos_coder_has_its_own_counts() -> None:
    projector = Projector(ProjectorConfig(VISION, 16, 576))
    counts = {len(few.shorten(projector, shard(), 0, 7, "braco", np.random.default_rng(seed))) for seed in range(8)}
    assert counts == {4, 11}


@pytest.mark.usefixtures("without_braco")
def test_a_batch_is_a_function_of_seed_and_step_and_holds_as_few_as_its_tier_says() -> None:
    _, projector, _ = parts()
    mixture, seen = loop.Mixture([shard()]), set[int]()
    for step in range(12):
        first, again = (few.batch_of_few(mixture, projector, few.FewRecipe(seed=3), step, Letters(), {}) for _ in range(2))
        other = few.batch_of_few(mixture, projector, few.FewRecipe(seed=4), step, Letters(), {})
        assert torch.equal(first.features, again.features) and torch.equal(first.ids, again.ids)
        assert first.features.shape != other.features.shape or not torch.equal(first.features, other.features)
        (tier,) = (tier for tier in few.TIERS if tier.length == first.ids.shape[1])
        counts = (first.visual // tier.length).bincount(minlength=tier.rows)
        assert len(counts) == tier.rows and tier.least <= int(counts.min()) and int(counts.max()) <= tier.most
        seen |= set(counts.tolist())
    assert min(seen) < 6 and max(seen) > 40


def tensors(adapters: tuning.Adapters) -> list[Tensor]:
    return [tensor.clone() for tensor in adapters.tensors().values()]


@pytest.mark.usefixtures("without_braco")
def test_a_broken_run_ends_as_a_whole_one_and_the_projector_learns_nothing(tmp_path: Path) -> None:
    ended = []
    for folder, lengths in ((tmp_path / "whole", (6,)), (tmp_path / "broken", (2, 2, 6))):
        for until in lengths:
            decoder, projector, adapters = parts()
            before = tensors(adapters), {name: tensor.clone() for name, tensor in projector.state_dict().items()}
            recipe = few.FewRecipe(steps=6, warmup=1, again=0.5)
            assert few.read_few(decoder, projector, adapters, [shard()], Letters(), MANY, recipe, folder, until=until) is (until == 6)
            assert all(torch.equal(projector.state_dict()[name], tensor) for name, tensor in before[1].items())
        ended.append(tensors(adapters))
        assert any(not torch.equal(now, then) for now, then in zip(ended[-1], before[0], strict=True))
    for whole, broken in zip(*ended, strict=True):
        torch.testing.assert_close(broken, whole, atol=1e-6, rtol=1e-5)
    decoder, projector, adapters = parts()
    torch.nn.init.normal_(adapters.b[0])
    with pytest.raises(InputError, match="name another folder"):
        few.read_few(decoder, projector, adapters, [shard()], Letters(), MANY, recipe, tmp_path / "whole")


def test_it_goes_on_from_an_adapter_of_the_same_shape_alone(tmp_path: Path) -> None:
    _, projector, adapters = parts()
    for b in adapters.b:
        torch.nn.init.normal_(b)
    program.export(tmp_path / ADAPTER, projector, adapters)
    decoder, _, further = parts()
    further.go_on(read_adapter(tmp_path / ADAPTER).updates)
    for found, expected in zip(tensors(further), tensors(adapters), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    with pytest.raises(InputError, match="rank 3"):
        tuning.Adapters(decoder, 3, 2.0, 0).go_on(read_adapter(tmp_path / ADAPTER).updates)


def test_what_ships_can_be_gone_on_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    adapter = read_adapter(bundle("mini").adapter)
    assert program.main(["--folder", str(tmp_path), "--start", str(tmp_path / "none.safetensors"), "--renders", "0", "--no-compile"]) == 2
    assert "none.safetensors" in capsys.readouterr().err
    assert {update.a.shape[0] for update in adapter.updates.values()} == {tuning.Recipe().rank}
    assert not list(tmp_path.iterdir())
