"""Mixtures of experts against transformers' routers and experts, and against a loop over tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from mmsdk.decoder.moe import Experts, MixedMLP, Mixture, Router
from mmsdk.errors import ModelError

WIDTH = 16
V2 = Mixture(experts=8, chosen=3, inner=12, shared=24, scoring="softmax", scale=1.5)
V3 = Mixture(
    experts=8, chosen=3, inner=12, shared=24, scoring="sigmoid", groups=4, chosen_groups=2, balanced=True, normalised=True, scale=2.5
)
SIZES = {
    "hidden_size": WIDTH, "num_attention_heads": 2, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2,
}  # fmt: skip
GROUPED = {"n_group": 4, "topk_group": 2}
PAIRS = {
    "greedy": (V2, DeepseekV2Moe(DeepseekV2Config(**SIZES, routed_scaling_factor=1.5))),
    "grouped": (
        replace(V2, groups=4, chosen_groups=2),
        DeepseekV2Moe(DeepseekV2Config(**SIZES, **GROUPED, topk_method="group_limited_greedy", routed_scaling_factor=1.5)),
    ),
    "balanced": (V3, DeepseekV3MoE(DeepseekV3Config(**SIZES, **GROUPED, routed_scaling_factor=2.5))),
    "unnormalised": (replace(V3, normalised=False), DeepseekV3MoE(DeepseekV3Config(**SIZES, **GROUPED, norm_topk_prob=False))),
}


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (*module.parameters(), *module.buffers()):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return module.eval()


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_a_mixture_equals_that_of_transformers(name: str) -> None:
    mixture, reference = PAIRS[name]
    filled(reference)
    ours = MixedMLP(WIDTH, mixture, bias=False)
    ours.router.weight.copy_(reference.gate.weight)
    if ours.router.bias is not None:
        ours.router.bias.copy_(reference.gate.e_score_correction_bias)
    ours.experts.gate_up.copy_(reference.experts.gate_up_proj.flatten(0, 1))
    ours.experts.down.copy_(reference.experts.down_proj.flatten(0, 1))
    shared = reference.shared_experts
    ours.shared.gate_up.weight.copy_(torch.cat((shared.gate_proj.weight, shared.up_proj.weight)))
    ours.shared.down.weight.copy_(shared.down_proj.weight)
    x = tokens(60).view(3, 20, WIDTH)
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)


def test_experts_equal_a_loop_over_tokens_and_many_are_as_few() -> None:
    experts = filled(Experts(WIDTH, V3))
    assert isinstance(experts, Experts)
    x, generator = tokens(9), torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(9)])
    weights = torch.rand(9, 3, generator=generator)
    gate_up, down = experts.gate_up.view(8, 24, WIDTH), experts.down.view(8, WIDTH, 12)
    expected = torch.zeros_like(x)
    for token in range(9):
        for place in range(3):
            gate, up = (gate_up[chosen[token, place]] @ x[token]).chunk(2)
            expected[token] += weights[token, place] * (down[chosen[token, place]] @ (F.silu(gate) * up))
    with torch.no_grad():
        torch.testing.assert_close(experts(x, chosen, weights), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(experts._each(x, chosen), experts._by_expert(x, chosen), rtol=1e-5, atol=1e-5)


def test_a_bias_changes_the_choice_and_never_the_weights() -> None:
    router = filled(Router(WIDTH, replace(V3, groups=1, chosen_groups=1, normalised=False, scale=1.0)))
    assert isinstance(router, Router) and router.bias is not None
    x = tokens(5)
    with torch.no_grad():
        router.bias.zero_()
        before, _ = router(x)
        router.bias[6] = 9.0
        chosen, weights = router(x)
    assert (chosen == 6).any(-1).all() and not (before == 6).any(-1).all()
    expected = torch.sigmoid(x @ router.weight.T).gather(1, chosen)
    torch.testing.assert_close(weights, expected.detach())


def test_no_token_leaves_its_best_groups() -> None:
    router = filled(Router(WIDTH, V3))
    with torch.no_grad():
        chosen, weights = router(tokens(200))
    assert all(len({expert // 2 for expert in row}) <= 2 for row in chosen.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), 2.5))


def test_every_expert_of_a_token_gets_a_gradient() -> None:
    mixed = filled(MixedMLP(WIDTH, V3, bias=True)).train()
    mixed(tokens(40)).square().mean().backward()
    assert all(one.grad is not None and one.grad.isfinite().all() for name, one in mixed.named_parameters() if name != "router.bias")
    assert (mixed.experts.gate_up.grad.view(8, -1).abs().sum(-1) > 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "experts is 0"),
        ({"groups": 3}, "even groups"),
        ({"chosen_groups": 5}, "even groups"),
        ({"groups": 8, "chosen_groups": 8}, "two best"),
        ({"chosen": 5}, "among 4"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(V3, **change)
