"""pi0 against transformers' own classes at a tiny random size: the same noise, the same actions; and its checkpoints in every spelling."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration

from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.stages import Context
from mmsdk.vla.heads.flow import FlowHead, FlowNetwork, euler, flow_loss, interpolate, noise_of, unguided
from mmsdk.vla.heads.load_pi0 import Pi0Parts, load_pi0
from mmsdk.vla.types import ActionHead, Observation, Stamp

IMAGE = 97
TEXT = {
    "model_type": "gemma",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": IMAGE,
}
SIGHT = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 40,
    "patch_size": 7,
    "image_size": 14,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vision_use_head": False,
    "projection_dim": 32,
}


@pytest.fixture(scope="module")
def theirs() -> PI0ForConditionalGeneration:
    torch.manual_seed(0)
    config = PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": TEXT,
            "vision_config": SIGHT,
            "projection_dim": 32,
            "image_token_id": IMAGE,
        },
        dit_config={**TEXT, "hidden_size": 16, "intermediate_size": 24},
        chunk_size=6,
        max_state_dim=5,
        max_action_dim=4,
    )
    model = PI0ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


@pytest.fixture(scope="module")
def folder(theirs: PI0ForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pi0")
    theirs.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def ours(folder: Path) -> Pi0Parts:
    return load_pi0(folder)


def inputs() -> dict[str, Tensor]:
    """Two rows: two cameras and three words; one camera and two words, padded."""
    generator = torch.Generator().manual_seed(1)
    return {
        "pixels": torch.rand(2, 2, 3, 14, 14, generator=generator) * 2 - 1,
        "present": torch.tensor([[True, True], [True, False]]),
        "ids": torch.tensor([[2, 11, 12], [2, 13, 0]]),
        "said": torch.tensor([[True, True, True], [True, True, False]]),
        "state": torch.randn(2, 5, generator=generator),
        "noise": torch.randn(2, 6, 4, generator=generator),
    }


def prefix(parts: Pi0Parts, rows: slice = slice(None)) -> Context:
    given = inputs()
    return parts.paligemma.prefix(*(given[name][rows] for name in ("pixels", "present", "ids", "said")))


def their_inputs() -> dict[str, Tensor]:
    given = inputs()
    ids = torch.tensor([[IMAGE] * 8 + [2, 11, 12], [IMAGE] * 4 + [2, 13] + [0] * 5])
    mask = torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": given["pixels"],
        "pixel_attention_mask": given["present"],
        "state": given["state"],
    }


def test_the_same_noise_gives_the_same_actions(theirs: PI0ForConditionalGeneration, ours: Pi0Parts) -> None:
    given = inputs()
    expected = theirs.sample_actions(**their_inputs(), noise=given["noise"])
    found = euler(ours.network.velocity(prefix(ours), given["state"]), given["noise"], 10)
    assert float((expected - given["noise"]).abs().max()) > 0.05
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_one_velocity_and_the_training_loss_are_the_same(theirs: PI0ForConditionalGeneration, ours: Pi0Parts) -> None:
    given, actions, times = inputs(), noise_of(5, (2, 6, 4)), torch.tensor([[0.3], [0.75]])
    with torch.no_grad():
        out = theirs(**their_inputs(), noise=given["noise"], timestep=times[:, 0], actions=actions)
        velocity = ours.network.velocity(prefix(ours), given["state"])
        found = velocity(interpolate(actions, given["noise"], times), times)
        loss = flow_loss(velocity, actions, given["noise"], times)
    torch.testing.assert_close(found, out.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(loss, out.loss, atol=1e-5, rtol=1e-5)


def test_the_prefix_is_computed_once_and_only_read(ours: Pi0Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    given, context = inputs(), prefix(ours)
    before = [(context.cache.view(layer).keys.clone(), context.cache.view(layer).values.clone()) for layer in range(3)]
    forks, fork = list[int](), DenseCache.fork

    def counted(cache: DenseCache) -> DenseCache:
        forks.append(1)
        return fork(cache)

    def refused(*_: object) -> None:
        raise AssertionError("the decoder or its cache was used for the suffix")

    monkeypatch.setattr(DenseCache, "fork", counted)
    monkeypatch.setattr(DenseCache, "append", refused)
    monkeypatch.setattr(DenseCache, "advance", refused)
    euler(ours.network.velocity(context, given["state"]), given["noise"], 4)
    assert len(forks) == 1
    for layer, (keys, values) in enumerate(before):
        assert torch.equal(context.cache.view(layer).keys, keys) and torch.equal(context.cache.view(layer).values, values)


def test_rows_do_not_see_each_other_nor_their_padding(ours: Pi0Parts) -> None:
    given = inputs()
    together = euler(ours.network.velocity(prefix(ours), given["state"]), given["noise"], 3)
    for row in (slice(0, 1), slice(1, 2)):
        alone = euler(ours.network.velocity(prefix(ours, row), given["state"][row]), given["noise"][row], 3)
        torch.testing.assert_close(alone, together[row], atol=1e-5, rtol=1e-5)


def observation(state: Tensor, seed: int = 3) -> Observation:
    return Observation({}, state, "pick up the cup", Stamp(captured=1.5, request=4, seed=seed))


def test_vr_06_the_head_answers_in_the_robots_dimensions(ours: Pi0Parts) -> None:
    head, context = FlowHead(ours.network, dims=3, steps=4), prefix(ours, slice(0, 1))
    assert isinstance(ours.network, FlowNetwork) and isinstance(head, ActionHead)
    chunk = head(context, observation(torch.tensor([0.5, -0.25])))
    assert chunk.actions.shape == (6, 3) and chunk.stamp == observation(torch.zeros(1)).stamp
    full = FlowHead(ours.network, dims=4, steps=4).guided(context, observation(torch.tensor([0.5, -0.25, 0, 0, 0])), unguided)
    torch.testing.assert_close(chunk.actions, full[:, :3])
    with pytest.raises(InputError, match="6 numbers.*at most 5"):
        head(context, observation(torch.zeros(6)))
    with pytest.raises(InputError, match="not finite"):
        head(context, observation(torch.tensor([float("nan")])))
    with pytest.raises(InputError, match="dims"):
        FlowHead(ours.network, dims=5)


def test_vr_32_an_answer_depends_on_its_seed_and_not_on_what_was_asked_between(ours: Pi0Parts) -> None:
    head, context = FlowHead(ours.network, dims=4, steps=2), prefix(ours, slice(0, 1))
    first = head(context, observation(torch.zeros(5), seed=1)).actions
    other = head(context, observation(torch.zeros(5), seed=2)).actions
    assert torch.equal(head(context, observation(torch.zeros(5), seed=1)).actions, first) and not torch.equal(first, other)


def test_vr_28_a_half_precision_head_takes_a_float32_state(folder: Path, ours: Pi0Parts) -> None:
    half, given = load_pi0(folder, torch.bfloat16), inputs()
    found = euler(half.network.velocity(prefix(half), given["state"]), given["noise"], 10)
    exact = euler(ours.network.velocity(prefix(ours), given["state"]), given["noise"], 10)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, atol=3e-2, rtol=3e-2)


def test_a_context_of_other_heads_is_refused(ours: Pi0Parts) -> None:
    cache = DenseCache.allocate(3, 1, 1, 8, 4, torch.float32, "cpu")
    with pytest.raises(ModelError, match="1 key-value heads of 8.*2 of 8"):
        ours.network.velocity(Context(torch.zeros(1, 32), cache), torch.zeros(1, 5))


SPELLINGS: dict[str, Callable[[str], str]] = {
    "transformers in memory": lambda name: _in_memory(name),
    "lerobot": lambda name: "model." + _modern(name),
    "openpi": lambda name: _modern(name),
}


def _modern(name: str) -> str:
    return name.replace("language_model.model.", "language_model.").replace("vision_tower.", "vision_tower.vision_model.")


def _in_memory(name: str) -> str:
    name = name.replace("paligemma_with_expert.paligemma.model.", "model.vlm.").replace("language_model.model.", "language_model.")
    name = name.replace("paligemma_with_expert.gemma_expert.model.", "model.dit.")
    return re.sub(r"^(state_proj|action_in_proj|action_time_mlp)", r"embed_action_time.\1", name)


def rewritten(folder: Path, place: Path, tensors: dict[str, Tensor]) -> Path:
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_every_spelling_of_a_checkpoint_gives_the_same_model(spelling: str, folder: Path, ours: Pi0Parts, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    parts = load_pi0(rewritten(folder, tmp_path, {SPELLINGS[spelling](name): tensor for name, tensor in stored.items()}))
    for part, other in ((ours.network, parts.network), (ours.paligemma.decoder, parts.paligemma.decoder)):
        for name, tensor in part.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_checkpoint_that_keeps_the_word_embedding_as_output_matrix_is_read(folder: Path, ours: Pi0Parts, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    embedding = stored.pop("paligemma_with_expert.paligemma.model.language_model.model.embed_tokens.weight")
    parts = load_pi0(rewritten(folder, tmp_path, {**stored, "paligemma_with_expert.paligemma.lm_head.weight": embedding}))
    assert torch.equal(parts.paligemma.decoder.embedding.weight, ours.paligemma.decoder.embedding.weight)


def test_missing_and_unexpected_tensors_are_all_listed(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    for name in ("state_proj.bias", "paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"):
        stored.pop(name)
    stored |= {"value_head.weight": torch.zeros(2, 2), "action_out_proj.scale": torch.zeros(3)}
    with pytest.raises(ModelError) as error:
        load_pi0(rewritten(folder, tmp_path, stored))
    for part in ("missing: expert.layers.1.mlp.up_proj.weight, state_proj.bias", "unexpected: action_out_proj.scale, value_head.weight"):
        assert part in str(error.value)


def test_tensors_of_a_wrong_shape_are_all_listed(folder: Path, tmp_path: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored |= {"state_proj.weight": torch.zeros(16, 9), "action_out_proj.bias": torch.zeros(5)}
    with pytest.raises(
        ModelError, match=r"wrong shape: (?=.*state_proj\.weight \(has \[16, 9\], expected \[16, 5\]\))(?=.*action_out_proj\.bias)"
    ):
        load_pi0(rewritten(folder, tmp_path, stored))
