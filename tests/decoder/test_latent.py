"""Latent attention as a layer's attention: what it says of its weights, and that it can be trained."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.utils import logging

from mmsdk.attention.dsa import Lightning
from mmsdk.attention.mla import AllSeen, Latent
from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.moe import Mixture
from mmsdk.decoder.transformer import Decoder, LayerAttention
from mmsdk.errors import ModelError
from mmsdk.kv.none import NoCache

SIZES = Latent(q_rank=20, kv_rank=16, nope=8, rope=4, value=6)
MIXTURE = Mixture(experts=4, chosen=2, inner=12, shared=12, scoring="sigmoid", balanced=True, normalised=True, plain=(0,))
CONFIG = DecoderConfig(
    vocabulary=60, width=32, layers=2, heads=4, kv_heads=1, head_dim=12, inner=40, context=64, attention=SIZES, feed=MIXTURE
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def decoder(config: DecoderConfig = CONFIG) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return Decoder.of(config, {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()})


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_the_weights_that_it_tells_are_those_of_transformers() -> None:
    """By them methods choose visual tokens inside the decoder (`received`)."""
    reference = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, intermediate_size=40,
            max_position_embeddings=64, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
            n_routed_experts=8, moe_intermediate_size=12, first_k_dense_replace=1, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    ours, theirs = decoder().layers[0], reference.model.layers[0]
    assert isinstance(ours.attention, LayerAttention)
    x, positions = drawn(1, 9, 32), torch.arange(9)[None]
    with torch.no_grad():
        for name, part in (("q_down", "q_a_proj"), ("q_up", "q_b_proj"), ("kv_down", "kv_a_proj_with_mqa"), ("kv_up", "kv_b_proj")):
            getattr(theirs.self_attn, part).weight.copy_(getattr(ours.attention, name).weight)
        for name, part in (("q_norm", "q_a_layernorm"), ("kv_norm", "kv_a_layernorm")):
            getattr(theirs.self_attn, part).weight.copy_(getattr(ours.attention, name).weight)
        turned = reference.model.rotary_emb(x, position_ids=positions)
        mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
        _, expected = theirs.self_attn(x, position_embeddings=turned, attention_mask=mask)
        query, key, _ = ours.attention.project(x, decoder().rotation(positions, torch.float32))
        weights = (query @ key.transpose(2, 3) / key.shape[3] ** 0.5 + mask).softmax(-1)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [3, 30])
def test_every_parameter_that_is_trained_by_answers_gets_a_gradient(length: int) -> None:
    """Absorbed at 3 tokens, expanded at 30. The balance of loads is trained by other means."""
    model = decoder()
    x = drawn(2, length, 32).requires_grad_()
    model.logits(model(x, torch.arange(length).expand(2, -1), NoCache())).square().mean().backward()
    named = {name: one.grad for name, one in model.named_parameters() if name != "embedding.weight" and not name.endswith("router.bias")}
    assert all(grad is not None and grad.isfinite().all() for grad in named.values())
    assert x.grad is not None and float(x.grad.abs().min()) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kv_heads": 2}, "one key-value head"), ({"head_dim": 14}, "heads of 12 channels")],
)
def test_a_config_that_does_not_fit_its_attention_is_refused(change: dict[str, int], message: str) -> None:
    sizes = {"vocabulary": 60, "width": 32, "layers": 2, "heads": 4, "kv_heads": 1, "head_dim": 12, "inner": 40, "context": 64}
    with pytest.raises(ModelError, match=message):
        DecoderConfig(**{**sizes, **change}, attention=SIZES)


def test_an_indexer_needs_queries_of_low_rank() -> None:
    with pytest.raises(ModelError, match="low rank"):
        Latent(q_rank=0, kv_rank=16, nope=8, rope=4, value=6, indexer=Lightning(4, 8, 16))
    assert Latent(q_rank=0, kv_rank=16, nope=8, rope=4, value=6).indexer == AllSeen()
