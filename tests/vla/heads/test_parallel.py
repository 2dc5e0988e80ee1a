"""OFT's parallel decoding: everything sees everything, the state before a placeholder predicts it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.kv.none import NoCache
from mmsdk.vla.heads.parallel import ParallelConfig, ParallelHead, ResidualMLP
from mmsdk.vla.heads.prefix import prefill_blocks
from mmsdk.vla.types import ActionHead, Observation, Stamp

SIZES = ParallelConfig(width=16, hidden=24, horizon=3, dims=2, stop=2)


def made() -> tuple[Decoder, ParallelHead]:
    config = DecoderConfig(30, 16, 2, 2, 1, 8, 16, 64)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()})
    torch.manual_seed(0)
    return decoder, ParallelHead(decoder, ResidualMLP(SIZES), SIZES)


def by_hand(mlp: ResidualMLP, x: Tensor) -> Tensor:
    state = mlp.state_dict()

    def layer(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * state[f"{name}.weight"] + state[
            f"{name}.bias"
        ]

    x = layer("into", norm("norm_in", x)).clamp_min(0)
    for block in range(2):
        x = x + layer(f"blocks.{block}.1", norm(f"blocks.{block}.0", x)).clamp_min(0)
    return layer("out", norm("norm_out", x))


def test_one_pass_over_prompt_and_placeholders_is_the_published_one() -> None:
    decoder, head = made()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        sequence = torch.cat((decoder.embed(ids), torch.zeros(1, 6, 16), decoder.embed(torch.tensor([[2]]))), dim=1)
        hidden = decoder(sequence, torch.arange(11)[None], NoCache(), torch.ones(1, 1, 11, 11, dtype=torch.bool))
        expected = torch.stack([by_hand(head.mlp, hidden[0, 3 + 2 * step : 5 + 2 * step].flatten()) for step in range(3)])
        found = head.predict(decoder.embed(ids), torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_do_not_see_their_padding() -> None:
    decoder, head = made()
    ids, valid = torch.tensor([[3, 4, 5, 6], [0, 7, 8, 9]]), torch.tensor([[True] * 4, [False] + [True] * 3])
    with torch.no_grad():
        both = head.predict(decoder.embed(ids), valid)
        alone = head.predict(decoder.embed(ids[1:, 1:]), valid[1:, 1:])
    torch.testing.assert_close(both[1:], alone, atol=1e-5, rtol=1e-5)


def test_the_head_equals_a_pass_in_which_the_prompt_does_not_see_the_placeholders() -> None:
    decoder, head = made()
    ids = torch.tensor([[3, 4, 5, 6]])
    assert isinstance(head, ActionHead)
    with torch.no_grad():
        known = prefill_blocks(decoder, decoder.embed(ids), torch.ones(1, 4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool))
        chunk = head(known, Observation({}, torch.zeros(2), "", Stamp(0.0)))
        sequence = torch.cat((decoder.embed(ids), torch.zeros(1, 6, 16), decoder.embed(torch.tensor([[2]]))), dim=1)
        mask = torch.ones(1, 1, 11, 11, dtype=torch.bool)
        mask[..., :4, 4:] = False
        hidden = decoder(sequence, torch.arange(11)[None], NoCache(), mask)
        expected = torch.stack([by_hand(head.mlp, hidden[0, 3 + 2 * step : 5 + 2 * step].flatten()) for step in range(3)])
    torch.testing.assert_close(chunk.actions, expected, atol=1e-5, rtol=1e-5)
    assert known.cache.view(0).keys.shape[2] == 4


def test_the_loss_is_absolute_and_reaches_every_parameter() -> None:
    decoder, head = made()
    decoder.requires_grad_(True)
    predicted = head.predict(decoder.embed(torch.tensor([[3, 4]])), torch.ones(1, 2, dtype=torch.bool))
    loss = head.loss(predicted, torch.zeros(1, 3, 2))
    torch.testing.assert_close(loss, predicted.abs().mean())
    loss.backward()
    assert all(parameter.grad is not None for parameter in head.mlp.parameters())
    assert all(float(layer.attention.qkv.weight.grad.abs().sum()) > 0 for layer in decoder.layers)
