"""VLA-Cache on pi0's own eyes at a tiny size: nothing still is the whole pass, and what is reused is what a slow version says."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration

from mmsdk.errors import InputError
from mmsdk.stages import Context
from mmsdk.vision.types import Image
from mmsdk.vla.flow_model import FlowModel
from mmsdk.vla.heads.flow import FlowHead
from mmsdk.vla.heads.load_pi0 import Pi0Parts, load_pi0
from mmsdk.vla.still import Reuse, StillModel, StillSight, alike, shares
from mmsdk.vla.types import Observation, Request, Stamp

LAYERS, WORDS = 4, 3
TEXT = {
    "model_type": "gemma", "hidden_size": 32, "num_hidden_layers": LAYERS, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
}  # fmt: skip
SIGHT = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 40, "patch_size": 7, "image_size": 28,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vision_use_head": False, "projection_dim": 32,
}  # fmt: skip
# everything that is alike may be reused
ALL = Reuse(most=32, relevant=0, look=2)
IDS, SAID = torch.tensor([[2, 11, 12]]), torch.ones(1, WORDS, dtype=torch.bool)
BOTH = torch.ones(1, 2, dtype=torch.bool)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Pi0Parts:
    torch.manual_seed(0)
    vlm = {"model_type": "paligemma", "text_config": TEXT, "vision_config": SIGHT, "projection_dim": 32, "image_token_id": 97}
    dit = {**TEXT, "hidden_size": 16, "intermediate_size": 24}
    model = PI0ForConditionalGeneration(PI0Config(vlm_config=vlm, dit_config=dit, chunk_size=6, max_state_dim=5, max_action_dim=4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    folder: Path = tmp_path_factory.mktemp("pi0")
    model.save_pretrained(folder)
    return load_pi0(folder)


def frame(seed: int) -> Tensor:
    """Two pictures of 28 x 28 pixels: four by four tokens each."""
    return torch.rand(1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def moved(before: Tensor, cells: list[int], seed: int = 9) -> Tensor:
    """The same but for these cells of the two pictures, which are all new."""
    out, fresh = before.clone(), frame(seed)
    for cell in cells:
        camera, y, x = cell // 16, 7 * (cell % 16 // 4), 7 * (cell % 4)
        out[0, camera, :, y : y + 7, x : x + 7] = fresh[0, camera, :, y : y + 7, x : x + 7]
    return out


def same(found: Context, expected: Context) -> None:
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=1e-5)
    for layer in range(LAYERS):
        mine, theirs = found.cache.view(layer), expected.cache.view(layer)
        assert torch.equal(mine.positions, theirs.positions[:, : mine.positions.shape[1]])
        torch.testing.assert_close(mine.keys, theirs.keys[:, :, : mine.keys.shape[2]], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values[:, :, : mine.values.shape[2]], atol=1e-5, rtol=1e-5)


def test_a_first_frame_and_one_in_which_all_is_new_are_read_whole(parts: Pi0Parts) -> None:
    sight = StillSight(parts.paligemma, ALL)
    for seed in (1, 2):
        same(sight.prefix(frame(seed), BOTH, IDS, SAID), parts.paligemma.prefix(frame(seed), BOTH, IDS, SAID))
        assert sight.reused == 0


def test_a_frame_that_is_the_same_is_the_same(parts: Pi0Parts) -> None:
    sight = StillSight(parts.paligemma, ALL)
    first = sight.prefix(frame(1), BOTH, IDS, SAID)
    same(sight.prefix(frame(1), BOTH, IDS, SAID), first)
    assert sight.reused > 0.2


@pytest.mark.parametrize(("change", "told"), [("words", "said"), ("camera", "seen"), ("reset", "begun")])
def test_another_prompt_or_camera_or_episode_is_read_whole(parts: Pi0Parts, change: str, told: str) -> None:
    sight = StillSight(parts.paligemma, ALL)
    sight.prefix(frame(1), BOTH, IDS, SAID)
    present, ids = torch.tensor([[True, change != "camera"]]), IDS + (change == "words")
    if change == "reset":
        sight.reset()
    same(sight.prefix(frame(1), present, ids, SAID), parts.paligemma.prefix(frame(1), present, ids, SAID))
    assert sight.reused == 0, told


def rotated(x: Tensor, position: int) -> Tensor:
    out, half = x.clone(), x.shape[-1] // 2
    for i in range(half):
        angle = position / 10_000 ** (i / half)
        a, b = x[..., i], x[..., i + half]
        out[..., i], out[..., i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def slowly(
    parts: Pi0Parts, pixels: Tensor, held: list[tuple[Tensor, Tensor]], stays: Callable[[int], set[int]]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, list[Tensor]]:
    """Token by token: keys and values of every layer, the last word's output, and what words attend to among visual tokens."""
    decoder = parts.paligemma.decoder
    stream = list(torch.cat((parts.paligemma.see(pixels), decoder.embed(IDS)), dim=1)[0])
    entries, looked = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for number, layer in enumerate(decoder.layers):
        keys, values, queries, old = [], [], [], stays(number)
        for place, x in enumerate(stream):
            heads = layer.attention.qkv(layer.norm1(x)).view(8, 8)
            queries.append(rotated(heads[:4], place))
            keys.append(held[number][0][:, place] if place in old else rotated(heads[4:6], place))
            values.append(held[number][1][:, place] if place in old else heads[6:])
        after, shares = list[Tensor](), torch.zeros(32)
        for place, x in enumerate(stream):
            out = []
            for head in range(4):
                scores = torch.stack([queries[place][head] @ key[head // 2] / math.sqrt(8) for key in keys]).softmax(0)
                out.append(sum(weight * value[head // 2] for weight, value in zip(scores, values, strict=True)))
                if place >= 32:
                    shares += scores[:32] / (4 * WORDS)
            x = x + layer.attention.o(torch.cat(out))
            after.append(x + layer.mlp(layer.norm2(x)))
        stream = after
        entries.append((torch.stack(keys, dim=1), torch.stack(values, dim=1)))
        looked.append(shares)
    return entries, decoder.norm(stream[-1]), looked


@torch.no_grad()
def test_what_is_reused_is_what_a_slow_version_says(parts: Pi0Parts) -> None:
    reuse = Reuse(most=20, relevant=3, look=2)
    sight, before, new = StillSight(parts.paligemma, reuse), frame(1), [0, 5, 6, 20, 21, 31]
    sight.prefix(before, BOTH, IDS, SAID)
    held, _, looked = slowly(parts, before, [], lambda layer: set())
    # all that did not change is alike; of equals the first are taken, of these not what words looked at most
    mattered = sorted(range(32), key=lambda token: -float(looked[2][token]))[:3]
    likest = [token for token in range(32) if token not in new][:20]
    still = [token for token in likest if token not in mattered]
    entropies = [float(-(p / p.sum() * (p / p.sum()).log()).sum()) / math.log(32) for p in looked]
    counts = [int(share * len(still)) for share in shares(entropies, 0.55)]
    assert 0 <= counts[0] <= counts[-1] <= len(still) and counts[-1] > 3
    expected, output, _ = slowly(parts, moved(before, new), held, lambda layer: set(still[: counts[layer]]))
    found = sight.prefix(moved(before, new), BOTH, IDS, SAID)
    torch.testing.assert_close(found.hidden[0], output, atol=1e-4, rtol=1e-4)
    for layer in range(LAYERS):
        view = found.cache.view(layer)
        torch.testing.assert_close(view.keys[0], expected[layer][0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(view.values[0], expected[layer][1], atol=1e-4, rtol=1e-4)
    assert sight.reused == pytest.approx(sum(counts) / (LAYERS * 32))


def cells_of(pixels: Tensor) -> Tensor:
    """The pixels of each token."""
    return (pixels[0] + 1).div(2).unfold(2, 7, 7).unfold(3, 7, 7).permute(0, 2, 3, 1, 4, 5).reshape(32, -1)


def test_slow_motion_adds_up(parts: Pi0Parts) -> None:
    """Each frame is like the one before, and the last is not like the first: nothing that is held is of pixels long gone."""
    sight, start, threshold = StillSight(parts.paligemma, replace(ALL, similar=0.99)), frame(1), 0.99
    sight.prefix(start, BOTH, IDS, SAID)
    reused = []
    for step in range(1, 9):
        now = start + 0.06 * step * (frame(2) - start)
        sight.prefix(now, BOTH, IDS, SAID)
        reused.append(sight.reused)
        (of,) = [each.patches for each in sight._before]
        cells = cells_of(now)
        assert float(alike(of, cells).min()) >= threshold
    assert float(alike(cells, cells_of(start)).max()) < threshold
    assert max(reused) > 0


def test_the_most_alike_go_first_and_what_matters_is_computed() -> None:
    similar, attended = torch.tensor([0.9, 1.0, 0.999, 0.997, 1.0]), torch.tensor([0.1, 0.5, 0.0, 0.0, 0.2])
    assert Reuse(most=5, relevant=0).still(similar, attended).tolist() == [1, 4, 2, 3]
    assert Reuse(most=3, relevant=1).still(similar, attended).tolist() == [4, 2]
    assert Reuse(most=0).still(similar, attended).tolist() == []
    with pytest.raises(InputError, match="growth is in"):
        Reuse(growth=2.0)


def test_patches_are_compared_by_their_cosine() -> None:
    before, now = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.3, 0.4]]), torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    torch.testing.assert_close(alike(before, now), torch.tensor([1.0, 0.0, 1.0]))


def test_shares_rise_slowly_and_never_fall() -> None:
    # 1 - entropy between the sharpest and the flattest: 0, .5, .25, 1; each rise is taken by .55 of it
    torch.testing.assert_close(shares([0.9, 0.7, 0.8, 0.5], 0.55), (0.0, 0.275, 0.275, 0.67375))
    assert shares([0.4, 0.4], 0.55) == (1.0, 1.0)


def test_a_model_remembers_within_an_episode_and_refuses_what_is_no_robot(parts: Pi0Parts) -> None:
    class Words:
        """A tokenizer of one word."""

        def encode(self, text: str) -> list[int]:
            return [11]

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    plain = FlowModel(parts.paligemma, FlowHead(parts.network, dims=4), Words(), "pi0", ("left", "right"), side=28)
    model = StillModel.of(plain, ALL)
    images = {name: Image((torch.rand(3, 28, 28) * 255).to(torch.uint8), name) for name in ("left", "right")}
    request = Request(Observation(images, torch.zeros(5), "lift", Stamp(0.0)), torch.zeros(0, 4))
    first = model(request)
    torch.testing.assert_close(first.actions, plain(request).actions, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(request).actions, first.actions, atol=1e-5, rtol=1e-5)
    assert model.sight.reused > 0
    model.reset(1)
    model(request)
    assert model.sight.reused == 0
    with pytest.raises(InputError, match="2 rows"):
        model.sight.prefix(frame(1).repeat(2, 1, 1, 1, 1), BOTH.repeat(2, 1), IDS.repeat(2, 1), SAID.repeat(2, 1))
    with pytest.raises(InputError, match="does not read a frame"):
        StillModel.of(replace(plain, sight=model.sight))
