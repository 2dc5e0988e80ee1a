"""OpenVLA's bins: the published golden values, and a decoder that says them."""

import numpy as np
import pytest
import torch

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.stages import Context
from mmsdk.vla.heads.bins import BinCodec, BinHead
from mmsdk.vla.types import Observation, Stamp


def test_golden_values_both_ways() -> None:
    values = torch.tensor([-1, -0.5, 0, 0.5, 1])
    ids = BinCodec().encode(values)
    assert ids.tolist() == [31999, 31936, 31872, 31808, 31744]
    torch.testing.assert_close(BinCodec().decode(ids), torch.tensor([-0.996078, -0.501961, 0, 0.501961, 0.996078]), atol=1e-6, rtol=0)


def test_every_bin_is_used_and_no_number_is_off_by_more_than_half_of_one() -> None:
    values = torch.linspace(-1.2, 1.2, 20_001)
    ids = BinCodec().encode(values)
    expected = 32_000 - np.digitize(np.clip(values.double().numpy(), -1, 1), np.linspace(-1, 1, 256))
    assert ids.tolist() == expected.tolist() and len(set(ids.tolist())) == 256
    assert float((BinCodec().decode(ids) - values.clamp(-1, 1)).abs().max()) <= 0.003922


def test_words_are_no_actions() -> None:
    for token in (31_743, 32_000, 5):
        with pytest.raises(InputError, match="31744 to 31999"):
            BinCodec().decode(torch.tensor([token]))
    with pytest.raises(InputError, match="not finite"):
        BinCodec().encode(torch.tensor([float("inf")]))


def test_the_head_says_the_likeliest_action_tokens_after_its_lead() -> None:
    config = DecoderConfig(320, 16, 1, 2, 1, 8, 16, 64)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()})
    codec, prompt = BinCodec(vocabulary=300), [3, 4, 5]

    def logits(ids: list[int]) -> torch.Tensor:
        cache = DenseCache.allocate(1, 1, 1, 8, 16, torch.float32, "cpu")
        with torch.no_grad():
            return decoder.logits(decoder(decoder.embed(torch.tensor([ids])), torch.arange(len(ids))[None], cache)[0, -1])

    cache = DenseCache.allocate(1, 1, 1, 8, 16, torch.float32, "cpu")
    with torch.no_grad():
        hidden = decoder(decoder.embed(torch.tensor([prompt])), torch.arange(3)[None], cache)
    stamp = Stamp(0.5, request=2)
    chunk = BinHead(decoder, dims=4, codec=codec, lead=29)(Context(hidden[:, -1], cache), Observation({}, torch.zeros(1), "", stamp))
    ids = [*prompt, 29]
    for _ in range(4):
        ids.append(44 + int(logits(ids)[44:300].argmax()))
    torch.testing.assert_close(chunk.actions, codec.decode(torch.tensor([ids[4:]])))
    assert chunk.stamp == stamp and cache.view(0).keys.shape[2] == 3


def test_vr_27_logits_that_are_not_finite_say_no_action() -> None:
    config = DecoderConfig(320, 16, 1, 2, 1, 8, 16, 64)
    broken = Decoder.of(config, {name: torch.full_like(tensor, float("nan")) for name, tensor in Decoder(config).state_dict().items()})
    cache = DenseCache.allocate(1, 1, 1, 8, 16, torch.float32, "cpu")
    head = BinHead(broken, dims=4, codec=BinCodec(vocabulary=300), lead=29)
    with pytest.raises(ModelError, match="logits of number 0 of the action are not finite"):
        head(Context(torch.zeros(1, 16), cache), Observation({}, torch.zeros(1), "", Stamp(0.5)))
