"""The glance: tokens say by themselves where they stand, hidden ones change nothing, and a look is plain attention written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmsdk.vla.heads.glance import Glance, GlanceConfig, Gleaned, Look

CONFIG = GlanceConfig(vision=12, kept=6, place=5, words=7, width=16, heads=2, inner=24, queries=3, looks=2, layers=2, where=6)


def filled(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


@pytest.fixture(scope="module")
def glance() -> Glance:
    made = Glance(CONFIG)
    filled(made)
    return made.requires_grad_(False)


def asked(count: int = 9, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, count, CONFIG.kept), (2, count, CONFIG.place), (2, 4, CONFIG.words)
    tokens, places, words = (torch.randn(shape, generator=generator) for shape in shapes)
    return tokens, places, torch.ones(2, count, dtype=torch.bool), words, torch.tensor([[True] * 4, [True, True, False, False]])


def same(one: Gleaned, other: Gleaned) -> None:
    torch.testing.assert_close(one.embeddings, other.embeddings)
    torch.testing.assert_close(one.where, other.where)


def test_the_order_of_tokens_does_not_matter(glance: Glance) -> None:
    tokens, places, shown, words, said = asked()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    same(glance(tokens[:, order], places[:, order], shown, words, said), glance(tokens, places, shown, words, said))
    assert not torch.allclose(glance(tokens, places[:, order], shown, words, said).where, glance(tokens, places, shown, words, said).where)


def test_hidden_tokens_and_words_that_are_none_change_nothing(glance: Glance) -> None:
    tokens, places, shown, words, said = asked()
    shown = torch.arange(9) < torch.tensor([[6], [9]])
    fewer = glance(tokens[:1, :6], places[:1, :6], shown[:1, :6], words[:1], said[:1])
    both = glance(tokens, places, shown, words, said)
    torch.testing.assert_close(both.where[:1], fewer.where)
    otherwise = glance(tokens, places, shown, torch.where(said[..., None], words, 9.0), said)
    torch.testing.assert_close(otherwise.where, both.where)
    assert both.embeddings.shape == (2, CONFIG.queries + 1, CONFIG.width)


def test_with_every_camera_dark_it_is_finite_and_one_answer(glance: Glance) -> None:
    tokens, places, shown, words, said = asked()
    dark = torch.zeros_like(shown)
    first = glance(tokens, places, dark, words, said)
    assert bool(first.embeddings.isfinite().all())
    same(first, glance(torch.randn_like(tokens), places, dark, words, said))


def test_a_look_is_attention_written_out() -> None:
    look = Look(CONFIG)
    filled(look)
    generator = torch.Generator().manual_seed(2)
    x, seen = torch.randn(1, 3, 16, generator=generator), torch.randn(1, 5, 16, generator=generator)
    shown = torch.tensor([True, True, False, True, True])

    def normed(value: Tensor, weight: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    queries, both = normed(x[0], look.norm1.weight) @ look.q.weight.T, seen[0] @ look.kv.weight.T
    heads = []
    for head in range(2):
        part = slice(8 * head, 8 * head + 8)
        scores = queries[:, part] @ both[:, :16][:, part].T / 8**0.5
        heads.append(scores.masked_fill(~shown, -torch.inf).softmax(1) @ both[:, 16:][:, part])
    after = x[0] + torch.cat(heads, dim=1) @ look.o.weight.T
    inner = normed(after, look.norm2.weight) @ look.mlp.gate_up.weight.T
    expected = after + (F.gelu(inner[:, :24], approximate="tanh") * inner[:, 24:]) @ look.mlp.down.weight.T
    torch.testing.assert_close(look(x, seen, shown[None, None, None])[0], expected)


def test_reduced_features_are_those_of_the_axes(glance: Glance) -> None:
    glance.centre.copy_(torch.arange(12.0))
    glance.axes.copy_(torch.eye(12)[3:9] * 2)
    features = torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(glance.reduced(features), 2 * (features - torch.arange(12.0))[:, 3:9])
