"""pi0.5 and SmolVLA against one slow pass over prefix and suffix together, written from the published rules, with a loop for every head."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

from mmsdk.decoder.config import DecoderConfig
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError
from mmsdk.kv.types import KVCache
from mmsdk.stages import Context
from mmsdk.vla.heads.branch import Branch
from mmsdk.vla.heads.expert import ExpertConfig
from mmsdk.vla.heads.flow import FlowNetwork, euler, flow_loss, noise_of
from mmsdk.vla.heads.load_pi0 import load_pi0
from mmsdk.vla.heads.load_smolvla import SmolVLASizes, load_smolvla
from mmsdk.vla.heads.pi05 import Pi05, Pi05Config
from mmsdk.vla.heads.prefix import prefill_blocks
from mmsdk.vla.heads.smolvla import SmolVLA, SmolVLAConfig
from mmsdk.vla.heads.visibility import visible

HEADS, GROUPS, SIZE = 4, 2, 8
GEMMA = DecoderConfig(40, 32, 3, HEADS, GROUPS, SIZE, 48, 128, activation="gelu_tanh")
LLAMA = DecoderConfig(40, 32, 4, HEADS, GROUPS, SIZE, 48, 128, norm_eps=1e-5)
VALID = torch.tensor([[True, True, False, True, True], [True] * 5])


def filled(module: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.25 for name, tensor in module.state_dict().items()}


def decoder(config: DecoderConfig) -> Decoder:
    return Decoder.of(config, filled(Decoder(config), 0))


def known(model: Decoder) -> tuple[Context, Tensor]:
    embeddings = noise_of(11, (2, 5, 32))
    return prefill_blocks(model, embeddings, VALID, torch.zeros(5, dtype=torch.bool), room=1), embeddings


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, positions: list[int]) -> Tensor:
    """Rotary positions of x [s h d], pair by pair."""
    out = x.clone()
    for place, position in enumerate(positions):
        for i in range(SIZE // 2):
            angle = position / 10_000 ** (2 * i / SIZE)
            left, right = x[place, :, i], x[place, :, i + SIZE // 2]
            out[place, :, i] = left * math.cos(angle) - right * math.sin(angle)
            out[place, :, i + SIZE // 2] = right * math.cos(angle) + left * math.sin(angle)
    return out


def attention(query: Tensor, key: Tensor, value: Tensor, seen: list[list[bool]]) -> Tensor:
    out = torch.zeros_like(query)
    for row in range(len(query)):
        among = [column for column in range(len(key)) if seen[row][column]]
        for head in range(HEADS) if among else ():
            group = head // (HEADS // GROUPS)
            shares = (key[among, group] @ query[row, head] / math.sqrt(SIZE)).softmax(0)
            out[row, head] = shares @ value[among, group]
    return out.flatten(1)


def projected(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (x @ weight.T).view(len(x), -1, SIZE).split((HEADS, GROUPS, GROUPS), dim=1)


def mlp(s: dict[str, Tensor], name: str, x: Tensor, tanh: bool) -> Tensor:
    gate, up = (x @ s[f"{name}.gate_up.weight"].T).chunk(2, dim=-1)
    return ((F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up) @ s[f"{name}.down.weight"].T


def linear(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]


def embedded(t: float, width: int) -> Tensor:
    angles = [2 * math.pi * t / (4e-3 * 1000 ** (i / (width // 2 - 1))) for i in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])


def rule(valid: list[bool], starts: list[int]) -> list[list[bool]]:
    """A[q][k] = valid_q and valid_k and cumsum(ar)_k <= cumsum(ar)_q."""
    block = [sum(starts[: i + 1]) for i in range(len(starts))]
    return [[valid[q] and valid[k] and block[k] <= block[q] for k in range(len(starts))] for q in range(len(starts))]


def places(valid: list[bool]) -> list[int]:
    return [sum(valid[: i + 1]) - 1 for i in range(len(valid))]


def pi05_by_hand(d: dict[str, Tensor], n: dict[str, Tensor], prefix: Tensor, valid: list[bool], x: Tensor, times: list[float]) -> Tensor:
    everyone = [*valid, *[True] * len(x)]
    seen, at, p = rule(everyone, [0] * len(valid) + [1] + [0] * (len(x) - 1)), places(everyone), len(valid)
    condition = F.silu(linear(n, "time_out", F.silu(linear(n, "time_in", torch.stack([embedded(t, 16) for t in times])))))

    def adapted(name: str, y: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift, gate = linear(n, f"{name}.modulation", condition).chunk(3, dim=-1)
        return (1 + scale) * rms(y, 1e-6) + shift, gate

    y = linear(n, "action_in", x)
    for i in range(3):
        mine, theirs = f"expert.layers.{i}", f"layers.{i}"
        read, gate = adapted(f"{mine}.norm1", y)
        q1, k1, v1 = projected(rms(prefix, 1e-6) * d[f"{theirs}.norm1.weight"], d[f"{theirs}.attention.qkv.weight"])
        q2, k2, v2 = projected(read, n[f"{mine}.attention.qkv.weight"])
        query, key = turned(torch.cat((q1, q2)), at), turned(torch.cat((k1, k2)), at)
        out = attention(query, key, torch.cat((v1, v2)), seen)
        prefix = prefix + out[:p] @ d[f"{theirs}.attention.o.weight"].T
        prefix = prefix + mlp(d, f"{theirs}.mlp", rms(prefix, 1e-6) * d[f"{theirs}.norm2.weight"], True)
        y = y + gate * (out[p:] @ n[f"{mine}.attention.o.weight"].T)
        read, gate = adapted(f"{mine}.norm2", y)
        y = y + gate * mlp(n, f"{mine}.mlp", read, True)
    return linear(n, "action_out", adapted("expert.norm", y)[0])


EXPERT = ExpertConfig(16, 3, HEADS, GROUPS, SIZE, 24)


def pi05() -> Pi05:
    network = Pi05(Pi05Config(EXPERT, chunk=4, action_dim=3))
    network.load_state_dict(filled(network, 1))
    return network.eval()


@pytest.mark.parametrize("times", [[0.7] * 4, [0.0, 0.0, 0.7, 0.7]])
def test_pi05_equals_one_slow_pass_with_times_that_may_differ(times: list[float]) -> None:
    model, network, x = decoder(GEMMA), pi05(), noise_of(3, (2, 4, 3))
    context, embeddings = known(model)
    t = torch.tensor([times, times], dtype=torch.float64)
    with torch.no_grad():
        found = network.velocity(context, torch.zeros(2, 0))(x, t if len(set(times)) > 1 else t[:, :1])
        for row in range(2):
            weights = dict(model.state_dict()), dict(network.state_dict())
            expected = pi05_by_hand(*weights, embeddings[row], VALID[row].tolist(), x[row], times)
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)


def test_pi05_begins_as_a_network_without_layers() -> None:
    torch.manual_seed(0)
    network, context = Pi05(Pi05Config(EXPERT, chunk=4, action_dim=3)), known(decoder(GEMMA))[0]
    x = noise_of(3, (2, 4, 3))
    with torch.no_grad():
        plain = network.action_out(rms(network.action_in(x), 1e-6))
        torch.testing.assert_close(network.velocity(context, torch.zeros(2, 0))(x, torch.full((2, 1), 0.5)), plain)
    assert isinstance(network, FlowNetwork) and network.state_dim == 0


def test_pi05_is_read_from_a_checkpoint_by_its_time_mlp(tmp_path: Path) -> None:
    network, state = pi05(), dict[str, Tensor]()
    for name, tensor in network.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner.endswith("attention.qkv"):
            layer = owner.removesuffix("attention.qkv").replace("expert.", "paligemma_with_expert.gemma_expert.model.")
            for letter, part in zip("qkv", tensor.split((HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)), strict=True):
                state[f"{layer}self_attn.{letter}_proj.weight"] = part.clone()
            continue
        if owner.endswith("gate_up"):
            layer = owner.removesuffix("gate_up").replace("expert.", "paligemma_with_expert.gemma_expert.model.")
            for word, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                state[f"{layer}{word}_proj.weight"] = part.clone()
            continue
        for ours, theirs in (
            ("expert.", "paligemma_with_expert.gemma_expert.model."),
            ("norm1.modulation", "input_layernorm.dense"),
            ("norm2.modulation", "post_attention_layernorm.dense"),
            ("norm.modulation", "norm.dense"),
            ("attention.o", "self_attn.o_proj"),
            ("mlp.down", "mlp.down_proj"),
            ("time_in", "time_mlp_in"),
            ("time_out", "time_mlp_out"),
            ("action_in", "action_in_proj"),
            ("action_out", "action_out_proj"),
        ):
            owner = owner.replace(ours, theirs)
        state[f"{owner}.{kind}"] = tensor
    (tmp_path / "config.json").write_text('{"type": "pi05", "action_expert_variant": "gemma_900m"}')
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="gemma_900m.*gemma_2b, gemma_300m"):
        load_pi0(tmp_path)
    sizes = (
        f'{{"model_type": "gemma", "hidden_size": %d, "num_hidden_layers": 3, "intermediate_size": 24, "num_attention_heads": {HEADS}, '
        f'"num_key_value_heads": {GROUPS}, "head_dim": {SIZE}}}'
    )
    (tmp_path / "config.json").write_text(
        f'{{"chunk_size": 4, "max_action_dim": 3, "dit_config": {sizes % 16}, "vlm_config": {{"text_config": {sizes % 32}, '
        '"vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 7, '
        '"image_size": 14}}}'
    )
    # only the prefix is missing, and every tensor of the expert has found its place
    with pytest.raises(ModelError, match=r"missing: vlm\.language_model") as error:
        load_pi0(tmp_path)
    assert "unexpected" not in str(error.value) and "missing: expert" not in str(error.value) and " expert." not in str(error.value)


SMOL = SmolVLAConfig(ExpertConfig(16, 4, HEADS, GROUPS, SIZE, 24, 1e-5, activation="silu"), 32, 2, chunk=4, action_dim=3, state_dim=5)


def smolvla(model: Decoder) -> SmolVLA:
    network = SmolVLA(model, SMOL)
    network.load_state_dict(filled(network, 2))
    return network.eval()


def smolvla_by_hand(
    d: dict[str, Tensor], n: dict[str, Tensor], prefix: Tensor, valid: list[bool], state: Tensor, x: Tensor, t: float
) -> Tensor:
    prefix, valid = torch.cat((prefix, linear(n, "state_in", state)[None])), [*valid, True]
    p, h, everyone = len(valid), len(x), [*valid, *[True] * len(x)]
    seen, at = rule(everyone, [0] * (p - 1) + [1] * (h + 1)), places(everyone)
    noisy = linear(n, "action_in", x)
    y = linear(n, "time_out", F.silu(linear(n, "time_in", torch.cat((noisy, embedded(t, 16).expand(h, -1)), dim=1))))
    for i in range(4):
        name = f"layers.{i}"
        q1, k1, v1 = projected(rms(prefix, 1e-5) * d[f"{name}.norm1.weight"], d[f"{name}.attention.qkv.weight"])
        q1, k1 = turned(q1, at[:p]), turned(k1, at[:p])
        read = rms(y, 1e-5) * n[f"{name}.norm1.weight"]
        if i % 2 == 0:
            q2, k2, v2 = projected(read, n[f"{name}.attention.qkv.weight"])
            out = attention(torch.cat((q1, turned(q2, at[p:]))), torch.cat((k1, turned(k2, at[p:]))), torch.cat((v1, v2)), seen)
            first, second = out[:p], out[p:]
        else:
            first = attention(q1, k1, v1, [row[:p] for row in seen[:p]])
            query = turned((read @ n[f"{name}.attention.q.weight"].T).view(h, HEADS, SIZE), list(range(h)))
            key = (k1.flatten(1) @ n[f"{name}.attention.k.weight"].T).view(p, GROUPS, SIZE)
            value = (v1.flatten(1) @ n[f"{name}.attention.v.weight"].T).view(p, GROUPS, SIZE)
            second = attention(query, key, value, [row[:p] for row in seen[p:]])
        prefix = prefix + first @ d[f"{name}.attention.o.weight"].T
        prefix = prefix + mlp(d, f"{name}.mlp", rms(prefix, 1e-5) * d[f"{name}.norm2.weight"], False)
        y = y + second @ n[f"{name}.attention.o.weight"].T
        y = y + mlp(n, f"{name}.mlp", rms(y, 1e-5) * n[f"{name}.norm2.weight"], False)
    return linear(n, "action_out", rms(y, 1e-5) * n["norm.weight"])


def test_smolvla_equals_one_slow_pass() -> None:
    model = decoder(LLAMA)
    network, x, state = smolvla(model), noise_of(3, (2, 4, 3)), noise_of(4, (2, 5))
    context, embeddings = known(model)
    with torch.no_grad():
        found = network.velocity(context, state)(x, torch.full((2, 1), 0.7, dtype=torch.float64))
        for row in range(2):
            weights = dict(model.state_dict()), dict(network.state_dict())
            expected = smolvla_by_hand(*weights, embeddings[row], VALID[row].tolist(), state[row], x[row], 0.7)
            torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)
    assert isinstance(network, FlowNetwork) and context.cache.view(0).keys.shape[2] == 5


def test_smolvlas_actions_are_causal() -> None:
    model = decoder(LLAMA)
    network, x, context = smolvla(model), noise_of(3, (2, 4, 3)), known(model)[0]
    velocity, t, changed = network.velocity(context, torch.zeros(2, 5)), torch.full((2, 1), 0.5), x.clone()
    changed[:, 2] += 1
    with torch.no_grad():
        before, after = velocity(x, t), velocity(changed, t)
    torch.testing.assert_close(after[:, :2], before[:, :2])
    assert not torch.allclose(after[:, 3], before[:, 3])


def test_training_reaches_every_parameter_of_smolvla_and_none_of_the_decoder() -> None:
    model = decoder(LLAMA).requires_grad_(False)
    network, context = smolvla(model), known(model)[0]
    loss = flow_loss(
        network.velocity(context, noise_of(4, (2, 5))), noise_of(5, (2, 4, 3)), noise_of(6, (2, 4, 3)), torch.full((2, 1), 0.4)
    )
    loss.backward()
    assert all(parameter.grad is not None and float(parameter.grad.abs().sum()) > 0 for parameter in network.parameters())
    assert not any(name.startswith("_decoder") for name in network.state_dict())


def test_vr_28_half_precision_smolvla_takes_a_float32_state() -> None:
    model, state = decoder(LLAMA), noise_of(4, (2, 5))
    exact = euler(smolvla(model).velocity(known(model)[0], state), noise_of(6, (2, 4, 3)), 4)
    half = decoder(LLAMA).to(torch.bfloat16)
    embeddings = noise_of(11, (2, 5, 32)).bfloat16()
    context = prefill_blocks(half, embeddings, VALID, torch.zeros(5, dtype=torch.bool))
    found = euler(smolvla(half).to(torch.bfloat16).velocity(context, state), noise_of(6, (2, 4, 3)), 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, atol=0.1, rtol=0.1)


def test_a_branch_continues_its_base_and_leaves_it_alone() -> None:
    model = decoder(LLAMA)
    context, _ = known(model)
    new, positions = noise_of(12, (2, 2, 32)), context.cache.position[:, None] + torch.arange(2)
    branch, fork = Branch(context.cache.fork(), 4), context.cache.fork()
    assert isinstance(branch, KVCache)
    with torch.no_grad():
        torch.testing.assert_close(model(new, positions, branch), model(new, positions, fork))
        row = branch.select(torch.tensor([1]))
        torch.testing.assert_close(
            model(new[1:], row.position[:, None] + torch.arange(2), row),
            model(new, branch.position[:, None] + torch.arange(2), branch.fork())[1:],
        )
    torch.testing.assert_close(branch.position, fork.position)
    for layer in range(4):
        torch.testing.assert_close(branch.view(layer).keys, fork.view(layer).keys)
        assert context.cache.view(layer).keys.shape[2] == 5


def test_a_layer_that_was_thinned_is_read_as_it_is() -> None:
    network, x = pi05(), noise_of(3, (2, 4, 3))
    whole, thin = known(decoder(GEMMA))[0], known(decoder(GEMMA))[0]
    # one row loses its padding and nothing else, the other its last token
    thin.cache.keep(1, torch.tensor([[0, 1, 3, 4], [0, 1, 2, 3]]))
    t = torch.full((2, 1), 0.5)
    with torch.no_grad():
        found, expected = (network.velocity(context, torch.zeros(2, 0))(x, t) for context in (thin, whole))
    torch.testing.assert_close(found[0], expected[0])
    assert not torch.allclose(found[1], expected[1])


def test_visibility_is_the_block_rule() -> None:
    valid, starts = [True, False, True, True, True, True], [0, 0, 1, 1, 0, 1]
    found = visible(torch.tensor([valid]), torch.tensor(starts, dtype=torch.bool))
    assert found[0].tolist() == rule(valid, starts)


def smolvlm_config() -> SmolVLMConfig:
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
    }
    return SmolVLMConfig(vision_config=vision, text_config={"model_type": "llama", "hidden_size": 32, "vocab_size": 40}, scale_factor=2)


def smolvla_checkpoint(model: Decoder, network: SmolVLA, place: Path) -> tuple[SmolVLMVisionTransformer, SmolVLMConnector]:
    """What lerobot saves, made of transformers' own vision modules and of our tensors under its names."""
    torch.manual_seed(0)
    eyes, connector = SmolVLMVisionTransformer(smolvlm_config().vision_config).eval(), SmolVLMConnector(smolvlm_config()).eval()
    inside = "model.vlm_with_expert."
    state = {f"{inside}vlm.model.vision_model.{name}": tensor for name, tensor in eyes.state_dict().items()}
    state |= {f"{inside}vlm.model.connector.{name}": tensor for name, tensor in connector.state_dict().items()}
    state |= {
        f"{inside}vlm.model.text_model.{name}": tensor
        for name, tensor in llama_names(dict(model.state_dict())).items()
        if name != "head.weight"
    }
    state[f"{inside}vlm.lm_head.weight"] = model.state_dict()["head.weight"]
    own = dict(network.state_dict())
    layers = {name: own.pop(name) for name in list(own) if name.startswith("layers.") or name == "norm.weight"}
    state |= {f"{inside}lm_expert.{name}": tensor for name, tensor in llama_names(layers).items()}
    words = {"state_in": "state_proj", "time_in": "action_time_mlp_in", "time_out": "action_time_mlp_out"}
    words |= {"action_in": "action_in_proj", "action_out": "action_out_proj"}
    state |= {f"model.{words[name.split('.')[0]]}.{name.split('.')[1]}": tensor for name, tensor in own.items()}
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, place / "model.safetensors")
    return eyes, connector


def llama_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("attention.qkv.weight"):
            for letter, part in zip("qkv", tensor.split((HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)), strict=True):
                out[name.replace("attention.qkv", f"self_attn.{letter}_proj")] = part
        elif name.endswith("gate_up.weight"):
            out |= {name.replace("gate_up", f"{word}_proj"): part for word, part in zip(("gate", "up"), tensor.chunk(2), strict=True)}
        else:
            for ours, theirs in (("embedding.", "embed_tokens."), ("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm")):
                name = name.replace(ours, theirs)
            for letter in "qkvo":
                name = name.replace(f"attention.{letter}.", f"self_attn.{letter}_proj.")
            out[name.replace("mlp.down.", "mlp.down_proj.")] = tensor
    return out


def test_smolvla_is_read_from_lerobots_names_and_sees_as_smolvlm_does(tmp_path: Path) -> None:
    model = decoder(LLAMA)
    network = smolvla(model)
    eyes, connector = smolvla_checkpoint(model, network, tmp_path)
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 7,
        "image_size": 28,
    }
    parts = load_smolvla(tmp_path, sizes=SmolVLASizes(SMOL, LLAMA, vision, shuffle=2))
    pixels, ids = torch.rand(1, 2, 3, 28, 28) * 2 - 1, torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        seen = connector(eyes(pixels[0]).last_hidden_state).flatten(0, 1) * 32**0.5
        embeddings = torch.cat((seen, model.embed(ids)[0]))[None]
        everyone = torch.ones(1, embeddings.shape[1], dtype=torch.bool)
        expected = prefill_blocks(model, embeddings, everyone, torch.zeros(embeddings.shape[1], dtype=torch.bool))
        found = parts.smolvlm.prefix(pixels, torch.ones(1, 2, dtype=torch.bool), ids, torch.ones(1, 3, dtype=torch.bool))
        torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
        state, noise = noise_of(4, (1, 5)), noise_of(6, (1, 4, 3))
        actions = euler(parts.network.velocity(found, state), noise, 2)
        torch.testing.assert_close(actions, euler(network.velocity(expected, state), noise, 2), atol=1e-4, rtol=1e-4)
