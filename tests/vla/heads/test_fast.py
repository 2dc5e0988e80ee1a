"""FAST: against SciPy's DCT, the published golden values, and every way in which a token text breaks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.fft import dct
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError, SafetyError
from mmsdk.kv.dense import DenseCache
from mmsdk.stages import Context
from mmsdk.vla.heads.fast import FastCodec, FastHead, dct_basis, read_codec
from mmsdk.vla.heads.state import bins_of_state, fast_prompt, pi0_prompt, pi05_prompt
from mmsdk.vla.types import Observation, Stamp


def walks(count: int, horizon: int = 50, dims: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    steps = torch.randn(count, horizon, dims, generator=generator).cumsum(1) * 0.1
    return list(steps / steps.abs().amax((1, 2), keepdim=True))


@pytest.fixture(scope="module")
def codec() -> FastCodec:
    return FastCodec.fit(walks(40), vocabulary=400)


def test_the_transform_is_scipys() -> None:
    chunk = walks(1)[0].double()
    expected = torch.from_numpy(dct(chunk.numpy(), axis=0, norm="ortho"))
    torch.testing.assert_close(dct_basis(50) @ chunk, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(dct_basis(50).T @ expected, chunk, atol=1e-12, rtol=0)


def test_vr_30_round_trips_are_exact_in_tokens_and_the_loss_is_bounded(codec: FastCodec) -> None:
    for chunk in walks(45)[-5:]:
        ids = codec.encode(chunk)
        back = codec.decode(ids, 50, 7)
        assert codec.encode(back) == ids and len(ids) < chunk.numel()
        assert float((back - chunk).abs().max()) <= codec.bound(50) + 1e-6


@pytest.mark.parametrize(("scale", "golden"), [(10.0, 0.098), (20.0, 0.055), (50.0, 0.020)])
def test_the_error_of_a_random_walk_is_about_the_golden_one(scale: float, golden: float) -> None:
    errors = []
    for chunk in walks(20):
        codec = FastCodec.fit([chunk], 256, scale)
        errors.append(float((codec.decode(codec.encode(chunk), 50, 7) - chunk).abs().max()))
    assert np.mean(errors) == pytest.approx(golden, rel=0.35)


def test_coefficients_have_the_published_layout_and_bound(codec: FastCodec) -> None:
    constant = torch.full((50, 7), 1.0)
    codes = [ord(character) + codec.min_token for character in codec.bpe.decode(codec.encode(constant))]
    # frequency 0 of all dimensions first: sqrt(T) s = 70.7
    assert codes == [71] * 7 + [0] * 343


@pytest.mark.parametrize("wrong", [-1, 3])
def test_vr_29_a_text_of_a_wrong_length_is_an_error_and_never_zeros(codec: FastCodec, wrong: int) -> None:
    codes = "".join(chr(5 - codec.min_token) for _ in range(50 * 7 + wrong))
    with pytest.raises(InputError, match=f"{350 + wrong} numbers, 50 actions of 7 are 350"):
        codec.decode(codec.bpe.encode(codes).ids, 50, 7)


def test_vr_30_coefficients_without_a_character_are_refused() -> None:
    bpe = FastCodec.fit(walks(2), 256).bpe
    flat = torch.zeros(2, 1)
    for min_token, what in (
        (1, "code -1"),
        (-0xD800, "code 55296"),
        (-0xDFFF, "code 57343"),
        (-0xFFFD, "code 65533"),
        (-0x110000, "code 1114112"),
    ):
        with pytest.raises(InputError, match=what):
            FastCodec(bpe, min_token).encode(flat)
    for min_token in (0, -0xD7FF, -0xE000, -0x10FFFF):
        codec = FastCodec(bpe, min_token)
        assert float(codec.decode(codec.encode(flat), 2, 1).abs().max()) == 0
    with pytest.raises(InputError, match="not finite"):
        FastCodec(bpe, -100).encode(torch.tensor([[float("nan")], [0.0]]))


def test_broken_token_streams_are_refused(codec: FastCodec) -> None:
    with pytest.raises(InputError, match="no token 9999"):
        codec.decode([9999], 1, 1)
    with pytest.raises(InputError, match="no token -1"):
        codec.decode([-1], 1, 1)
    # half of a two-byte character
    halves = codec.bpe.encode(chr(0x3F0)).ids
    assert len(halves) == 2
    with pytest.raises(InputError, match="midst of a character"):
        codec.decode(halves[:1], 1, 1)


def test_a_published_codec_is_read_from_its_folder(codec: FastCodec, tmp_path: Path) -> None:
    codec.bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "processor_config.json").write_text(f'{{"scale": 10, "min_token": {codec.min_token}, "vocab_size": 400}}')
    chunk = walks(1)[0]
    assert read_codec(tmp_path).encode(chunk) == codec.encode(chunk)


# The decoder's vocabulary: 0..19 words, then action tokens below 20 + 400 + 128 + 1, the last 128 unused.
VOCABULARY = 20 + 400 + 129


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = DecoderConfig(VOCABULARY, 16, 1, 2, 1, 8, 16, 1024)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()})


def context(decoder: Decoder) -> Context:
    cache = DenseCache.allocate(1, 1, 1, 8, 8, torch.float32, "cpu")
    with torch.no_grad():
        hidden = decoder(decoder.embed(torch.tensor([[3, 4, 5]])), torch.arange(3)[None], cache)
    return Context(hidden[:, -1], cache)


def test_the_head_says_what_the_decoder_likes_best_among_action_tokens(decoder: Decoder, codec: FastCodec) -> None:
    head = FastHead(decoder, codec, 50, 7, start=(7, 8), stop=9, vocabulary=VOCABULARY, limit=6)
    known = context(decoder)
    said = head.say(known, torch.Generator(), 0.0)
    ids, expected = [3, 4, 5, 7, 8], list[int]()
    size = codec.bpe.get_vocab_size()
    while len(expected) < 6:
        cache = DenseCache.allocate(1, 1, 1, 8, 32, torch.float32, "cpu")
        with torch.no_grad():
            logits = decoder.logits(decoder(decoder.embed(torch.tensor([ids])), torch.arange(len(ids))[None], cache)[0, -1])
        best = max([9, *range(VOCABULARY - 129 - size + 1, VOCABULARY - 128)], key=lambda token: float(logits[token]))
        if best == 9:
            break
        ids.append(best)
        expected.append(VOCABULARY - 129 - best)
    assert said == expected and known.cache.view(0).keys.shape[2] == 3


def test_vr_29_a_head_that_only_says_nonsense_raises_after_its_attempts(decoder: Decoder, codec: FastCodec) -> None:
    head = FastHead(decoder, codec, 50, 7, start=(7, 8), stop=9, vocabulary=VOCABULARY, limit=6, attempts=2)
    with pytest.raises(SafetyError, match="2 texts of action tokens"):
        head(context(decoder), Observation({}, torch.zeros(7), "", Stamp(0.0)))


def test_states_are_spelt_in_the_published_bins() -> None:
    values = torch.tensor([-1.5, -1.0, -0.999, 0.0, 0.5, 0.9999, 1.0, 3.0])
    expected = (np.digitize(values.numpy(), bins=np.linspace(-1, 1, 257)[:-1]) - 1).tolist()
    assert bins_of_state(values) == expected and expected[0] == -1 and expected[-1] == 255
    assert pi05_prompt(" pick_up\nthe cup ", torch.tensor([-1.0, 0.0])) == "Task: pick up the cup, State: 0 128;\nAction: "
    assert fast_prompt(" Pick_up the Cup ", torch.tensor([1.0])) == "Task: pick up the cup, State: 255;\n"
    assert pi0_prompt("open_it") == "open it\n"
    with pytest.raises(InputError, match="not finite"):
        bins_of_state(torch.tensor([float("nan")]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_vr_27_logits_that_are_not_finite_say_no_action(decoder: Decoder, codec: FastCodec, temperature: float) -> None:
    head, known = FastHead(decoder, codec, 50, 7, start=(7, 8), stop=9, vocabulary=VOCABULARY, limit=6), context(decoder)
    broken = Decoder.of(decoder.config, {name: tensor * float("nan") for name, tensor in decoder.state_dict().items()})
    with pytest.raises(ModelError, match="not finite"):
        replace(head, decoder=broken).say(known, torch.Generator().manual_seed(0), temperature)
