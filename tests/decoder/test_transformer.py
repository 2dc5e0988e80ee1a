"""What the decoder promises beyond its numbers: training through it, masks, and errors that name what is wrong."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.norm import RMSNorm
from mmsdk.decoder.transformer import Decoder, SelfAttention
from mmsdk.errors import ModelError
from mmsdk.kv.dense import DenseCache
from mmsdk.kv.none import NoCache

CONFIG = DecoderConfig(vocabulary=50, width=24, layers=2, heads=4, kv_heads=2, head_dim=6, inner=40, context=64)


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()})


def hidden(model: Decoder, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
    out: Tensor = model(x, positions, NoCache(), mask)
    return out


def test_every_parameter_and_the_input_get_a_gradient_that_differences_confirm() -> None:
    model = decoder().double()
    x = torch.randn(1, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    mask = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    mask[0, 0, 3] = False  # a token that sees nothing must not spoil the others
    positions = torch.arange(5)[None]
    model.logits(hidden(model, x, positions, mask)).double().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for name, p in model.named_parameters() if not name.startswith("embedding"))
    weight = model.layers[0].attention.qkv.weight

    def loss() -> float:
        with torch.no_grad():
            return float(model.logits(hidden(model, x, positions, mask)).double().square().mean())

    for place in ((0, 3), (25, 10), (40, 23)):  # a query, a key and a value row
        step = 1e-4
        with torch.no_grad():
            weight[place] += step
            above = loss()
            weight[place] -= 2 * step
            below = loss()
            weight[place] += step
        assert float(weight.grad[place]) == pytest.approx((above - below) / (2 * step), rel=1e-2, abs=1e-5)


def test_an_explicit_causal_mask_equals_the_rule_of_positions() -> None:
    model, x = decoder(), torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(6).expand(2, -1)
    lower = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        torch.testing.assert_close(hidden(model, x, positions, lower), hidden(model, x, positions))


def test_packed_sequences_with_positions_that_restart_equal_separate_ones() -> None:
    model, x = decoder(), torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(1))
    segment = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = ((segment[:, None] == segment[None]) & torch.ones(7, 7, dtype=torch.bool).tril())[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with torch.no_grad():
        together = hidden(model, x, positions, mask)
        for start, end in ((0, 3), (3, 7)):
            torch.testing.assert_close(together[:, start:end], hidden(model, x[:, start:end], positions[:, start:end]))


def test_ka_22_continuations_from_a_fork_equal_fresh_runs() -> None:
    model, x = decoder(), torch.randn(1, 9, 24, generator=torch.Generator().manual_seed(1))
    cache = DenseCache.allocate(2, 1, 2, 6, 4, torch.float32, "cpu")
    positions = torch.arange(9)[None]
    with torch.no_grad():
        model(x[:, :5], positions[:, :5], cache)
        first, second = cache.fork(), cache.fork()
        other = torch.flip(x[:, 5:], [1])
        for one, rest in ((first, x[:, 5:]), (second, other), (cache, x[:, 5:])):
            fresh = hidden(model, torch.cat((x[:, :5], rest), 1), positions)[:, 5:]
            torch.testing.assert_close(model(rest, positions[:, 5:], one), fresh)


def test_thinning_a_cache_equals_a_mask_over_the_dropped_entries() -> None:
    model, x = decoder(replace(CONFIG, layers=1)), torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(1))
    cache = DenseCache.allocate(1, 1, 2, 6, 4, torch.float32, "cpu")
    kept = torch.tensor([[0, 2, 5]])
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    mask[..., 6:, [1, 3, 4]] = False
    with torch.no_grad():
        model(x[:, :6], torch.arange(6)[None], cache)
        cache.keep(0, kept)
        thinned = model(x[:, 6:], torch.tensor([[6, 7]]), cache)
        torch.testing.assert_close(thinned, hidden(model, x, torch.arange(8)[None], mask)[:, 6:])


@pytest.mark.parametrize("change", [{}, {"qk_norm": True}, {"qkv_bias": True}, {"query_scale": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_keys_alone_are_those_among_queries_and_values(change: dict[str, bool | float], dtype: torch.dtype) -> None:
    """Also of a matrix that is more than its weight, whose parts cannot be had."""
    model = decoder(replace(CONFIG, **change)).to(dtype)  # type: ignore[arg-type]  # the changes are of its fields
    attention, x = model.layers[1].attention, torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert isinstance(attention, SelfAttention)
    rotation = model.rotation(torch.arange(9).expand(2, -1), dtype)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(attention.keys(x, rotation), attention.project(x, rotation)[1], **close)

    class Twice(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    once = attention.project(x, rotation)[1]
    attention.qkv.__class__ = Twice
    expected = once if change.get("qk_norm") else 2 * once
    torch.testing.assert_close(attention.keys(x, rotation), expected, rtol=5e-2, atol=5e-2)


def test_rms_norm_equals_its_definition_in_float64_where_float16_squares_overflow() -> None:
    norm = RMSNorm(8, 1e-6).half()
    x = torch.linspace(300, 30_000, 8).half()
    exact = x.double() / x.double().square().mean().sqrt()
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "share"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"layers": 10**9}, "layers"),
        ({"width": -1}, "width"),
        ({"vocabulary": True}, "vocabulary"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change: dict[str, int | float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(CONFIG, **change)


def test_missing_unknown_and_misshapen_tensors_are_named() -> None:
    state = decoder().state_dict()
    for name, change in {
        "norm.weight": {},
        "layers.2.norm1.weight": {"layers.2.norm1.weight": torch.ones(24)},
        "head.weight": {"head.weight": torch.zeros(49, 24)},
    }.items():
        given = {key: value for key, value in state.items() if key != "norm.weight" or change} | change
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            Decoder.of(CONFIG, given)


def test_the_decoder_lives_on_the_tensors_it_was_given() -> None:
    state = decoder().state_dict()
    made = Decoder.of(CONFIG, state)
    assert all(tensor.data_ptr() == state[name].data_ptr() for name, tensor in made.state_dict().items())
