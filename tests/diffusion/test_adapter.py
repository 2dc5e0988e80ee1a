"""Sparse attention in diffusers' own transformers at tiny size: nothing changes where all is kept, and all of it comes out again."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from mmsdk.diffusion import sparsify
from mmsdk.diffusion.attention.types import Blocks, Choice, Place, Selection
from mmsdk.errors import InputError, ModelError, PluginError

with warnings.catch_warnings():
    # what diffusers itself warns of while it is imported is not ours
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")
    CLASSES = {
        "wan": diffusers.WanTransformer3DModel,
        "ltx": diffusers.LTXVideoTransformer3DModel,
        "cogvideox": diffusers.CogVideoXTransformer3DModel,
        "hunyuan": diffusers.HunyuanVideoTransformer3DModel,
        "minimax": diffusers.MiniMaxH3Transformer3DModel,
    }

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
FRAMES, SIDE, TEXT = 5, 18, 8

CONFIGS: dict[str, dict[str, Any]] = {
    "wan": {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256}
    | {"ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
    "ltx": {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
    | {"num_layers": 2, "caption_channels": 16},
    "cogvideox": {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2}
    | {"text_embed_dim": 16, "num_layers": 2, "sample_width": SIDE, "sample_height": SIDE, "sample_frames": 4 * (FRAMES - 1) + 1}
    | {"max_text_seq_length": TEXT},
    "hunyuan": {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1}
    | {"num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 16}
    | {"pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4), "guidance_embeds": False},
    "minimax": {"num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1}
    | {"ffn_dim": 32, "in_channels": 4, "audio_in_channels": 6, "text_dim": 16, "time_embed_hidden_dim": 16, "time_embed_dim": 16}
    | {"rope_freq_dim": 2},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return CLASSES[family](**CONFIGS[family]).eval()


def arguments(family: str, timestep: float = 500.0, text: int = TEXT) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    given: dict[str, Any] = {"encoder_hidden_states": normal(1, text, 16), "timestep": torch.tensor([timestep]), "return_dict": False}
    if family == "minimax":
        return given | packed(normal, 1 - timestep / 1000, text)
    if family == "ltx":
        sides = {"num_frames": FRAMES, "height": SIDE // 2, "width": SIDE // 2}
        tokens = normal(1, FRAMES * SIDE * SIDE // 4, 4)
        return given | sides | {"hidden_states": tokens, "encoder_attention_mask": torch.ones(1, text)}
    shape = (1, FRAMES, 4, SIDE, SIDE) if family == "cogvideox" else (1, 4, FRAMES, SIDE, SIDE)
    given["hidden_states"] = normal(*shape)
    if family == "hunyuan":
        mask = torch.arange(text) < text - 3
        given |= {"encoder_attention_mask": mask[None].long(), "pooled_projections": normal(1, 8)}
    return given


def packed(normal: Callable[..., Tensor], time: float, text: int) -> dict[str, Any]:
    """One sequence of text, a frame that is given, sound, and the frames that are made; 1 is clean."""
    side, sound = SIDE // 2, 6
    kinds = torch.cat([torch.full((n,), kind) for n, kind in ((text, 1), (side**2, 0), (sound, 2), (FRAMES * side**2, 0))])
    frame = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    places = torch.zeros(len(kinds), 3, dtype=torch.float64)
    places[:text, 0] = torch.arange(text)
    places[text : text + side**2, 1:] = frame
    places[-FRAMES * side**2 :] = torch.cat([torch.cat((torch.full((side**2, 1), 5.0 * f + text), frame), 1) for f in range(FRAMES)])
    times = torch.ones(len(kinds), dtype=torch.long)
    times[: text + side**2] = 0
    of_kind = {"text_indices": 1, "audio_indices": 2, "video_indices": 0}
    return {
        "hidden_states": normal(1, (1 + FRAMES) * side**2, 16),
        "audio_hidden_states": normal(1, sound, 6),
        "timestep": torch.tensor([1.0, time]),
        "timestep_indices": times,
        "token_tags": kinds,
        "position_ids": places,
        **{name: (kinds == kind).nonzero()[:, 0] for name, kind in of_kind.items()},
    }


def run(model: Any, family: str, **changes: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**arguments(family, **changes))[0]
    return out


@pytest.mark.parametrize("family", CLASSES)
def test_keeping_all_is_what_diffusers_computes_and_removing_is_exact(family: str) -> None:
    """Text before, behind (three of eight padded) or not in the self-attention at all; 405 video tokens, no multiple of a block."""
    model = model_of(family)
    before = run(model, family)
    handle = sparsify(model, "nabla:mass=1.0")
    torch.testing.assert_close(run(model, family), before, rtol=1e-4, atol=1e-4)
    assert handle.calls == 2
    handle.remove()
    assert torch.equal(run(model, family), before) and handle.calls == 2


@pytest.mark.parametrize(
    "method", ["sta:window_frames=1,tile_frames=2,tile_height=3", "ress", "vsa", "radial:dense_steps=0,dense_layers=0"]
)
@pytest.mark.parametrize("family", CLASSES)
def test_methods_run_in_every_family_and_change_something(family: str, method: str) -> None:
    model = model_of(family)
    before = run(model, family)
    with sparsify(model, method) as handle:
        after = run(model, family)
        assert handle.calls == 2 and after.isfinite().all()
        assert method.startswith("radial") or not torch.equal(after, before)
    assert torch.equal(run(model, family), before)


class Recording:
    """Keeps all, and notes where it was asked."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Place) -> Choice:
        self.places.append(place)
        blocks = Blocks(64, query.shape[2])
        mask = torch.ones(*query.shape[:2], blocks.count, blocks.count, dtype=torch.bool)
        return Selection(mask, blocks, blocks, memory=(torch.tensor(len(self.places)),))


@pytest.mark.parametrize(("family", "before"), [("wan", 0), ("minimax", TEXT + SIDE**2 // 4 + 6)])
def test_steps_layers_branches_and_generations_are_told_apart(family: str, before: int) -> None:
    """Two passes a step, as with classifier-free guidance; then another generation from the top. MiniMax's time rises."""
    model, method = model_of(family), Recording()
    scheduler = SimpleNamespace(timesteps=[900, 600, 300])
    with sparsify(SimpleNamespace(components={"transformer": model, "scheduler": scheduler, "vae": None}), method):
        for timestep in (900, 600, 300, 900):
            for _ in range(2):
                run(model, family, timestep=timestep)
    told = [(place.step, place.layer) for place in method.places]
    assert told == [(step, layer) for step in (0, 1, 2, 0) for _ in range(2) for layer in range(2)]
    assert all((place.steps, place.layers) == (3, 2) for place in method.places)
    memories = [int(place.memory[0]) if place.memory else 0 for place in method.places]
    # what a call is handed is what the call of the same branch and layer, four before, kept; a new generation begins with nothing
    assert memories == [0] * 4 + [1, 2, 3, 4, 5, 6, 7, 8] + [0] * 4
    grid = method.places[0].grid
    assert (grid.frames, grid.height, grid.width, grid.before, grid.after) == (FRAMES, SIDE // 2, SIDE // 2, before, 0)


def test_cross_attention_over_as_many_tokens_is_left_alone() -> None:
    """As many words as the video has tokens: what runs sparsely is told by the module, not by lengths."""
    model = model_of("wan")
    tokens = FRAMES * SIDE * SIDE // 4
    before = run(model, "wan", text=tokens)
    with sparsify(model, "nabla:mass=1.0") as handle:
        torch.testing.assert_close(run(model, "wan", text=tokens), before, rtol=1e-4, atol=1e-4)
        assert handle.calls == 2


def test_text_stands_where_each_family_puts_it() -> None:
    for family, before, after in (("cogvideox", TEXT, 0), ("hunyuan", 0, TEXT - 3)):
        model, method = model_of(family), Recording()
        with sparsify(model, method):
            run(model, family)
        assert {(place.grid.before, place.grid.after) for place in method.places} == {(before, after)}
        assert all(place.projection is not None and place.projection.shape[0] == 2 for place in method.places)


def test_a_failing_method_leaves_nothing_behind() -> None:
    class Failing:
        def __call__(self, query: Tensor, keys: Tensor, values: Tensor, place: Place) -> Choice:
            raise InputError("no")

    model = model_of("wan")
    before = run(model, "wan")
    handle = sparsify(model, Failing())
    with pytest.raises(InputError, match="no"):
        run(model, "wan")
    assert not _get_current_function_mode_stack()
    handle.remove()
    assert torch.equal(run(model, "wan"), before)


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ModelError, match="Linear is of no family that sparse attention is known for: WanTransformer3DModel"):
        sparsify(torch.nn.Linear(2, 2), "svg2")
    with pytest.raises(PluginError, match="svg2"):
        sparsify(model_of("wan"), "svg3")
    mixed, model = arguments("minimax"), model_of("minimax")
    mixed["position_ids"] = mixed["position_ids"].flip(0)
    with sparsify(model, "ress"), pytest.raises(InputError, match=r"position_ids: .* as the last rows, frame by frame"):
        model(**mixed)
    with pytest.raises(ModelError, match="no transformer"):
        sparsify(SimpleNamespace(components={"unet": torch.nn.Linear(2, 2)}), "svg2")
