"""DORA against a loop over pictures, blocks and tokens: what the actor sees, what goes, and that what is gone has no say any more."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.tokencomp.actor import FRACTIONS, Actor, ActorConfig, removals, staying
from mmsdk.tokencomp.methods.dora import DORA
from mmsdk.vision.encode import Encoder
from mmsdk.vision.encoders.dinov2 import Dinov2
from mmsdk.vision.packed import Rows
from mmsdk.vision.preprocess import Preprocess
from mmsdk.vision.prune import Agent, Pruning, View
from mmsdk.vision.taps import Taps
from mmsdk.vision.types import Image, Media, Video
from mmsdk.vision.vit import ViT, ViTConfig

WIDTH, DEPTH = 24, 6
TAPS = Taps(hidden=(1, 3), keys=(-1,), first_rows=(-1, 2), mean_rows=(-1,), norms=(2,))


def vit_of(depth: int = DEPTH) -> ViT:
    torch.manual_seed(0)
    vit = ViT(ViTConfig(width=WIDTH, layers=depth, heads=3, hidden=48, grid=5)).eval().requires_grad_(False)
    for block in vit.blocks:
        torch.nn.init.normal_(block.qkv.weight, std=0.3)
    return vit


def actor_file(folder: Path, *, gate: float = 0.5) -> str:
    """An actor of large random weights, so that decisions differ from picture to picture; `gate` makes it rather prune."""
    torch.manual_seed(0)
    actor = Actor(ActorConfig(WIDTH, DEPTH, hidden=16))
    for parameter in actor.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    for part in (actor.gate, actor.count):
        torch.nn.init.normal_(part.weight, std=3.0)
    torch.nn.init.constant_(actor.gate.bias, gate)
    facts = {"width": str(WIDTH), "depth": str(DEPTH), "hidden": "16", "drop": "1.0", "blocks": ",".join(map(str, actor.config.blocks))}
    path = folder / "actor.safetensors"
    save_file({k: v.contiguous() for k, v in actor.state_dict().items()}, path, metadata=facts)
    return str(path)


@pytest.fixture(scope="module")
def dora(tmp_path_factory: pytest.TempPathFactory) -> DORA:
    return DORA(actor_file(tmp_path_factory.mktemp("actor")), least=3)


def images(count: int, rows: int = 5, columns: int = 5) -> Tensor:
    """Pictures that differ in level and contrast, too."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, 14 * rows, 14 * columns, generator=generator)
    return x * torch.linspace(0.1, 3, count)[:, None, None, None] + torch.linspace(-2, 2, count)[:, None, None, None]


def slow(vit: ViT, image: Tensor, dora: DORA, most: int, exact: bool) -> tuple[Tensor, list[int], dict[int, dict[int, Tensor]], list[int]]:
    """One picture, block by block: final states, the patches left, the states of every patch after each block, and the lengths."""
    actor = DORA.agent(dora, vit.embed(image), DEPTH, 1, most, exact)
    net, least = actor.actor, most if exact else min(dora.least, most)  # type: ignore[attr-defined]
    x = vit.embed(image)[0]
    full, patches = len(x) - 1, list(range(len(x) - 1))
    looks: Tensor | None = None
    after, lengths = {}, []
    for i, block in enumerate(vit.blocks):
        if i in range(2, DEPTH - 1):
            assert looks is not None
            go = chosen(net, x, looks, len(patches) / full, i / DEPTH, least, most if i == DEPTH - 2 else full)
            stay = [0, *(j + 1 for j in range(len(patches)) if j not in go)]
            x, patches = x[stay], [patches[j - 1] for j in stay[1:]]
        lengths.append(len(x))
        query, key, value = block.qkv(block.norm1(x)).view(len(x), 3, 3, -1).permute(1, 2, 0, 3)
        weights = (query @ key.transpose(1, 2) / 8**0.5).softmax(-1)
        x = block.add1(x, block.o((weights @ value).transpose(0, 1).flatten(1)))
        x = block.add2(x, block.mlp(block.norm2(x)[None])[0])
        looks = weights[:, 0].mean(0)
        after[i] = dict(zip(patches, x[1:], strict=True))
    return vit.norm(x), patches, after, lengths


def chosen(net: Actor, x: Tensor, looks: Tensor, left: float, place: float, least: int, most: int) -> set[int]:
    """The patches to go, as the actor's description says it: by hand, token by token."""
    states = F.layer_norm(x, (WIDTH,))
    own, others = states[0], states[1:]
    row = torch.cat((own, others.mean(0), others.std(0, correction=0)))
    where = [*torch.tensor([left]).log().tolist(), place, 1.0]
    context = F.gelu(net.trunk(torch.cat((F.gelu(net.summary(row)), torch.tensor(where)))))
    n = len(others)
    fraction = FRACTIONS[int(net.count(context).argmax())]
    remove = max(0, min(int(fraction * n), n - least)) if float(net.gate(context)) > 0 else 0
    remove = max(remove, n - most)
    norms, seen = x[1:].norm(dim=1).log(), looks[1:].clamp_min(1e-9).log()
    keep = []
    for j in range(n):
        marks = torch.stack((F.cosine_similarity(own, others[j], dim=0), norms[j] - norms.mean(), seen[j] - seen.mean()))
        inner = F.gelu(net.token(others[j]) + net.marks(marks) + net.context(context))
        keep.append(float(net.rank(inner) + net.attention * marks[2]))
    return set(sorted(range(n), key=lambda j: (keep[j], -j))[:remove])


@pytest.mark.parametrize(("most", "exact"), [(25, False), (12, False), (10, True), (1, True), (24, True)])
def test_a_packed_batch_equals_a_loop_over_pictures_blocks_and_tokens(dora: DORA, most: int, exact: bool) -> None:
    vit, batch = vit_of(), images(6)
    out = vit(batch, TAPS, Pruning(dora, most, exact))
    assert exact or len(set(out.groups.lengths)) > 1, "the pictures are too much alike to tell anything"
    for i in range(6):
        states, patches, after, lengths = slow(vit, batch[i : i + 1], dora, most, exact)
        m = len(patches)
        assert out.groups.lengths[i] == m
        torch.testing.assert_close(out.cls[i], states[:1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.tokens[i, :m], states[1:], rtol=1e-4, atol=1e-4)
        assert not out.tokens[i, m:].any()
        expected = [1 + patches.index(p) if p in patches else -1 for p in range(25)]
        assert out.groups.owner[i].tolist() == expected and out.groups.size[i].tolist() == [1] * (1 + m) + [0] * (out.tokens.shape[1] - m)
        for layer in (1, 3):
            kept = torch.stack([after[layer][p] for p in patches])
            torch.testing.assert_close(out.taps.hidden[layer][i, 1 : 1 + m], kept, rtol=1e-4, atol=1e-4)
        ran = [sum(p in after[block] for block in range(DEPTH)) / DEPTH for p in range(25)]
        torch.testing.assert_close(out.groups.ran[i], torch.tensor(ran))
        assert [1 + sum(r * DEPTH > block + 0.5 for r in ran) for block in range(DEPTH)] == lengths


def test_a_batch_equals_pictures_alone_in_all_that_is_read(dora: DORA) -> None:
    vit, batch = vit_of(), images(6)
    out = vit(batch, TAPS, Pruning(dora, 25, False))
    for i in range(6):
        one, m = vit(batch[i : i + 1], TAPS, Pruning(dora, 25, False)), out.groups.lengths[i]
        assert one.groups.lengths == (m,) and torch.equal(one.groups.owner[0], out.groups.owner[i])
        torch.testing.assert_close(out.tokens[i, :m], one.tokens[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.taps.keys[-1][i, :, : m + 1], one.taps.keys[-1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.taps.norms[2][i, : m + 1], one.taps.norms[2][0], rtol=1e-4, atol=1e-4)
        for mine, its in ((out.taps.first_rows, one.taps.first_rows), (out.taps.mean_rows, one.taps.mean_rows)):
            torch.testing.assert_close(mine[-1][i, :, : m + 1], its[-1][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(mine[-1][i].sum(-1), torch.ones(3))
            assert not mine[-1][i, :, m + 1 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_gate_is_the_plain_transformer_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    vit, closed = vit_of().to(dtype), DORA(actor_file(tmp_path, gate=-1e6))
    plain, pruned = vit(images(3).to(dtype), TAPS), vit(images(3).to(dtype), TAPS, Pruning(closed, 25, False))
    assert torch.equal(plain.tokens, pruned.tokens) and torch.equal(plain.cls, pruned.cls)
    assert torch.equal(plain.groups.owner, pruned.groups.owner) and (pruned.groups.ran == 1).all()
    for name in ("hidden", "norms", "keys", "first_rows", "mean_rows"):
        for layer, value in getattr(plain.taps, name).items():
            assert torch.equal(value, getattr(pruned.taps, name)[layer]), (name, layer)


def test_a_whole_budget_is_the_plain_transformer_bit_for_bit(dora: DORA) -> None:
    """PP-09."""
    vit = vit_of()
    assert torch.equal(vit(images(3)).tokens, vit(images(3), shortening=Pruning(dora, 25)).tokens)


@dataclass(frozen=True)
class Poisoned:
    """Decides as DORA, then makes infinite what goes."""

    inner: Agent

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.inner.blocks

    def __call__(self, view: View) -> Tensor:
        stays = self.inner(view)
        view.stream[~stays] = torch.inf
        return stays


@dataclass(frozen=True)
class Poisoner:
    by: DORA

    def agent(self, stream: Tensor, depth: int, first: int, most: int, exact: bool) -> Agent:
        return Poisoned(self.by.agent(stream, depth, first, most, exact))


def test_what_is_gone_has_no_say_in_later_blocks(dora: DORA) -> None:
    vit, batch = vit_of(), images(4)
    clean, poisoned = (vit(batch, Taps(keys=(-1,)), Pruning(by, 25, False)) for by in (dora, Poisoner(dora)))
    assert sum(clean.groups.lengths) < 100 and torch.equal(clean.tokens, poisoned.tokens)
    assert torch.equal(clean.cls, poisoned.cls) and torch.equal(clean.taps.keys[-1], poisoned.taps.keys[-1])


def test_blocks_really_run_on_fewer_tokens(dora: DORA) -> None:
    vit, seen = vit_of(), []
    for block in vit.blocks:
        block.qkv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
        block.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
    out = vit(images(4), shortening=Pruning(dora, 25, False))
    lengths = [4 + round(float((out.groups.ran * DEPTH > block + 0.5).sum())) for block in range(DEPTH)]
    assert lengths[-1] == 4 + sum(out.groups.lengths) < lengths[0] == seen[0] == 4 * 26
    # filled up to a multiple of 16 once anything is gone
    assert seen == [n if n == lengths[0] else -(-n // 16) * 16 for n in lengths for _ in range(2)]


def test_decisions_are_the_same_again(dora: DORA) -> None:
    vit, batch = vit_of(), images(5)
    first, again = (vit(batch, shortening=Pruning(dora, 25, False)) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.groups.owner, again.groups.owner)


def test_of_equal_logits_the_later_goes_and_class_tokens_never() -> None:
    rows = Rows((6, 4), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]), 6, 1)
    stays = staying(torch.tensor([-9.0, 1, 1, 1 + 1e-8, 1, 1, -9, 2, 2, 2]), torch.tensor([2, 3]), rows)
    assert stays.tolist() == [True, True, True, True, False, False, True, False, False, False]


@pytest.mark.parametrize(("patches", "least"), [(256, 8), (9, 8), (8, 8), (100, 1), (5, 5)])
def test_removals_are_floors_that_leave_the_least(patches: int, least: int) -> None:
    found = removals(torch.arange(len(FRACTIONS)), torch.full((len(FRACTIONS),), patches), least)
    assert found.tolist() == [max(0, min(int(fraction * patches), patches - least)) for fraction in FRACTIONS]


def test_an_actor_of_another_transformer_is_refused(dora: DORA, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="24 wide of 6 blocks.*this one is 24 wide, of 4 blocks"):
        vit_of(4)(images(1), shortening=Pruning(dora, 25, False))
    siglip = ViT(ViTConfig(width=WIDTH, layers=DEPTH, heads=3, hidden=48, grid=5, class_token=False)).eval()
    with pytest.raises(ModelError, match="0 class tokens"):
        siglip(images(1), shortening=Pruning(dora, 25, False))
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    for path in ("junk", "absent"):
        with pytest.raises(ModelError, match=f"{path}.safetensors cannot be read as an actor"):
            vit_of()(images(1), shortening=Pruning(DORA(str(tmp_path / f"{path}.safetensors")), 25, False))
    with pytest.raises(ModelError, match="at least one"):
        replace(dora, least=0)


def encoder_of() -> Encoder:
    return Encoder(Dinov2(vit_of(), middle=(1,)), Preprocess(area=25), batch=3)


def pixels(seed: int, count: int = 1, height: int = 70, width: int = 70) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 1 + torch.randint(0, 250, (1,), generator=generator)
    return (torch.rand(count, 3, height, width, generator=generator) * spread).to(torch.uint8)


MEDIA: list[Media] = [
    Image(pixels(0)[0], "a"), Image(pixels(1, height=42, width=112)[0], "b"), Video(pixels(2, 4), torch.arange(4) * 0.5, "c"),
    Image(pixels(3)[0], "d"), Image(pixels(4)[0], "e"),
]  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
def test_an_encoder_accounts_for_every_patch_and_a_batch_equals_its_inputs_alone(dora: DORA, exact: bool) -> None:
    encoder = encoder_of()
    counts = [encoder.count(item.size, len(item.frames) if isinstance(item, Video) else 1) for item in MEDIA]
    budgets = [n // 2 if exact else n for n in counts]
    plans = [
        encoder.prunings(item.size, len(item.frames) if isinstance(item, Video) else 1, dora, budget, exact)
        for item, budget in zip(MEDIA, budgets, strict=True)
    ]
    together = encoder.pruned(MEDIA, plans)
    for item, plan, budget, result in zip(MEDIA, plans, budgets, together, strict=True):
        tokens, owner = result.tokens, result.owner
        assert len(tokens) == budget if exact else 3 <= len(tokens) <= budget
        assert torch.equal(tokens.weight, torch.ones(len(tokens))) and tokens.features.shape == (len(tokens), 2 * WIDTH)
        stays = owner >= 0
        assert owner[stays].tolist() == list(range(len(tokens))) and torch.equal(tokens.positions, result.positions[stays])
        assert (result.scores[stays] == 1).all() and (result.scores[~stays] < 1).all() and (result.scores > 0).all()
        assert tokens.keys is not None and len(tokens.keys) == len(tokens.saliency) == len(tokens) and tokens.features.isfinite().all()
        (alone,) = encoder.pruned([item], [plan])
        assert torch.equal(alone.owner, owner) and torch.equal(alone.tokens.positions, tokens.positions)
        torch.testing.assert_close(alone.tokens.features, tokens.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alone.tokens.saliency, tokens.saliency, rtol=1e-4, atol=1e-5)
    if not exact:
        assert len({len(result.tokens) / budget for result, budget in zip(together, budgets, strict=True)}) > 1
