"""Adapters against PEFT itself: real PEFT models over tiny models of transformers, saved by `save_pretrained` and read from there."""

import json
import math
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mmsdk.decoder.adapted import Adapter, Stack, merged, numbers, wear
from mmsdk.decoder.quantised import quantise
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import ModelError, WeightsError
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import collect, generate
from mmsdk.kv.dense import DenseCache
from mmsdk.models.text import read_decoder
from mmsdk.quant.types import Quantize
from mmsdk.weights.peft import read_adapter

# PEFT asks transformers in words that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
VOCABULARY, TOKENS = 96, 32
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True, "target_modules": "all-linear"},
    "dora": {"r": 3, "lora_alpha": 6, "use_dora": True, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 4, "target_modules": r".*\.(self_attn\.[qkv]_proj|mlp\.down_proj)", "exclude_modules": ["1.self_attn.k_proj"],
        "rank_pattern": {"v_proj": 2, r"0\.self_attn\.q_proj": 5}, "alpha_pattern": {r"layers\.1\..*": 16.0}, "fan_in_fan_out": False,
    },
    "layers": {"r": 2, "lora_alpha": 8, "target_modules": SEVEN, "layers_to_transform": [1]},
}  # fmt: skip
PROMPT = torch.randint(0, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(1))


def randomised(model: Any, seed: int, *parts: str) -> None:
    """Weights large enough that answers vary; of an adapter all of it, as training leaves it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if parts and "magnitude" in name and any(part in name for part in parts):
                weight.mul_(0.5 + torch.rand(weight.shape, generator=generator))
            elif not parts or any(part in name for part in parts):
                weight.normal_(0, 0.2, generator=generator).add_(float("norm" in name))


class Trained:
    """A model of transformers in a folder, and adapters that PEFT saved beside it, each trained on its own."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder, self.family = folder, family
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES))
        randomised(model, 0)
        model.save_pretrained(folder / "base")
        for seed, (kind, settings) in enumerate(KINDS.items(), start=1):
            adapted = get_peft_model(self.model(), LoraConfig(task_type="CAUSAL_LM", **settings))
            randomised(adapted, seed, "lora_")
            adapted.save_pretrained(folder / kind)
        self.decoder = read_decoder(folder / "base", torch.float32)

    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / "base", dtype=torch.float32).eval()

    def theirs(self, *kinds: str) -> Any:
        """PEFT's model with these adapters, all of them active."""
        model = PeftModel.from_pretrained(self.model(), self.folder / kinds[0], adapter_name=kinds[0])
        for kind in kinds[1:]:
            model.load_adapter(self.folder / kind, adapter_name=kind)
        model.base_model.set_adapter(list(kinds))
        return model.eval()

    def stack(self, *kinds: str, decoder: Decoder | None = None, **weights: float) -> Stack:
        """The same ones of ours."""
        return tuple(
            (Adapter(kind, kind.encode(), read_adapter(self.folder / kind, decoder or self.decoder)), weights.get(kind, 1.0))
            for kind in kinds
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """With biases on queries, keys and values, which DoRA leaves alone."""
    return Trained("qwen2", tmp_path_factory.mktemp("qwen2"))


def cache_of(decoder: Decoder, rows: int, room: int) -> DenseCache:
    config = decoder.config
    return DenseCache.allocate(config.layers, rows, config.kv_heads, config.entry, room, torch.float32, torch.device("cpu"))


@torch.no_grad()
def scores(decoder: Decoder, ids: torch.Tensor = PROMPT) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    return decoder.logits(decoder(decoder.embed(ids), positions, cache_of(decoder, len(ids), ids.shape[1])))


@torch.no_grad()
def says(decoder: Decoder, ids: torch.Tensor = PROMPT, tokens: int = TOKENS) -> list[list[int]]:
    cache = cache_of(decoder, len(ids), ids.shape[1] + tokens)
    hidden = decoder(decoder.embed(ids), torch.arange(ids.shape[1]).expand(len(ids), -1), cache)[:, -1]
    configs = [GenerationConfig(max_tokens=tokens - 2 * row) for row in range(len(ids))]
    return [list(row.ids) for row in collect(generate(decoder, hidden, cache, configs, str, frozenset()), len(ids))]


@torch.no_grad()
def theirs(model: Any, ids: torch.Tensor = PROMPT) -> tuple[torch.Tensor, list[int]]:
    """PEFT's scores at every token, and its greedy answer."""
    whole = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return model(input_ids=ids).logits, whole[0, ids.shape[1] :].tolist()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("family", ["trained", "biased"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_peft(request: pytest.FixtureRequest, family: str, kind: str) -> None:
    trained: Trained = request.getfixturevalue(family)
    wanted, said = theirs(trained.theirs(kind))
    ours = wear(trained.decoder, [trained.stack(kind)])
    assert apart(scores(ours), wanted) <= 1e-4
    assert says(ours) == [said]
    assert apart(scores(trained.decoder), wanted) > 1e-2, "the adapter makes a difference"


@pytest.mark.parametrize("kinds", [("plain", "rslora"), ("dora", "plain"), ("patterns", "dora"), ("rslora", "plain", "layers")])
def test_several_adapters_are_those_of_peft(trained: Trained, kinds: tuple[str, ...]) -> None:
    wanted, said = theirs(trained.theirs(*kinds))
    ours = wear(trained.decoder, [trained.stack(*kinds)])
    assert apart(scores(ours), wanted) <= 1e-4
    assert says(ours) == [said]


def test_weights_are_the_scales_of_peft(trained: Trained) -> None:
    model = trained.theirs("plain", "rslora")
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("plain", 0.5)
            module.set_scale("rslora", -1.25)
    wanted, said = theirs(model)
    ours = wear(trained.decoder, [trained.stack("plain", "rslora", plain=0.5, rslora=-1.25)])
    assert apart(scores(ours), wanted) <= 1e-4
    assert says(ours) == [said]


@pytest.mark.parametrize("kinds", [("plain",), ("rslora", "dora")])
def test_merged_weights_answer_as_adapters_do_and_as_merged_ones_of_peft(biased: Trained, kinds: tuple[str, ...]) -> None:
    trained = biased
    before = {name: tensor.clone() for name, tensor in trained.decoder.state_dict().items()}
    stack = trained.stack(*kinds)
    one = merged(trained.decoder, stack)
    wanted, said = theirs(trained.theirs(*kinds).merge_and_unload(adapter_names=list(kinds)))
    assert apart(scores(one), wanted) <= 1e-4 and says(one) == [said]
    assert apart(scores(one), scores(wear(trained.decoder, [stack]))) <= 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained.decoder.state_dict().items()), "what it was made from stays"
    assert one.embedding is trained.decoder.embedding


def test_rows_of_a_batch_each_have_their_own(trained: Trained) -> None:
    """One by one, and in a batch from which rows drop out: with one adapter, with another, with both, with none."""
    stacks = [trained.stack("plain"), (), trained.stack("dora"), trained.stack("rslora", "plain"), trained.stack("plain")]
    ids = torch.randint(0, VOCABULARY, (len(stacks), 9), generator=torch.Generator().manual_seed(2))
    alone = [wear(trained.decoder, [stack]) for stack in stacks]
    together = wear(trained.decoder, stacks)
    assert apart(scores(together, ids), torch.cat([scores(one, ids[row : row + 1]) for row, one in enumerate(alone)])) <= 1e-5
    expected = [says(one, ids[row : row + 1], 12)[0][: 12 - 2 * row] for row, one in enumerate(alone)]
    assert says(together, ids, 12) == expected


def test_no_adapter_is_the_decoder_itself(trained: Trained) -> None:
    assert wear(trained.decoder, [(), ()]) is trained.decoder
    assert wear(trained.decoder, [trained.stack("plain"), ()]).among([1]) is trained.decoder


def test_steps_of_one_token_in_bfloat16_have_them_too(trained: Trained) -> None:
    """Where single tokens may take another way through a decoder than prompts do, they must not pass its adapters by."""
    decoder = read_decoder(trained.folder / "base", torch.bfloat16)
    stack = trained.stack("rslora", decoder=decoder)
    wanted = scores(merged(trained.decoder, trained.stack("rslora")))
    for one in (wear(decoder, [stack]), merged(decoder, stack)):
        with torch.no_grad():
            config = decoder.config
            cache = DenseCache.allocate(config.layers, 1, config.kv_heads, config.entry, 32, torch.bfloat16, torch.device("cpu"))
            steps = [one(one.embed(PROMPT[:, i : i + 1]), torch.tensor([[i]]), cache) for i in range(PROMPT.shape[1])]
            found = one.logits(torch.cat(steps, dim=1))
        assert apart(found, wanted) < 0.2 * apart(scores(trained.decoder), wanted)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["plain", "dora"])
def test_qlora_is_peft_over_the_numbers_that_the_codes_stand_for(trained: Trained, quantize: Quantize, kind: str) -> None:
    decoder = read_decoder(trained.folder / "base", torch.float32)
    quantise(decoder, quantize)
    model = trained.theirs(kind)
    with torch.no_grad():
        for index, layer in enumerate(model.base_model.model.model.layers):
            for ours, their in {"attention.qkv": "qkv", "attention.o": "o", "mlp.gate_up": ("gate", "up"), "mlp.down": ("down",)}.items():
                block = layer.self_attn if ours.startswith("attention") else layer.mlp
                parts = [getattr(block, f"{name}_proj") for name in their]
                bases = [part.base_layer if hasattr(part, "base_layer") else part for part in parts]
                wide = numbers(decoder.get_submodule(f"layers.{index}.{ours}"))
                for base, rows in zip(bases, wide.split([len(base.weight) for base in bases]), strict=True):
                    base.weight.copy_(rows)
        head = decoder.get_submodule("head")
        model.base_model.model.lm_head.weight.copy_(numbers(head))
        # as many tokens as are multiplied in float32 by the weights written out
        ids = torch.randint(0, VOCABULARY, (1, 140), generator=torch.Generator().manual_seed(3))
        ours = wear(decoder, [trained.stack(kind, decoder=decoder)])
        assert apart(scores(ours, ids), model(input_ids=ids).logits) <= 1e-4
    with pytest.raises(ModelError, match="cannot be merged into matrices in fewer bits"):
        merged(decoder, trained.stack(kind, decoder=decoder))


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_only_dora_reads_the_matrices_that_it_changes(trained: Trained, quantize: Quantize, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in fewer bits would all be written out for it."""
    decoder, read = read_decoder(trained.folder / "base", torch.float32), list[Any]()
    quantise(decoder, quantize)

    def spied(module: Any) -> torch.Tensor:
        read.append(module)
        return numbers(module)

    monkeypatch.setattr(sys.modules[read_adapter.__module__], "numbers", spied)
    updates = read_adapter(trained.folder / "rslora", decoder)
    assert not read and all(len(update.up) == len(numbers(decoder.get_submodule(name))) for name, update in updates.items())
    assert len(read_adapter(trained.folder / "dora", decoder)) == len(read) > 0


# What is refused, and told by name.


@pytest.fixture
def one(trained: Trained, tmp_path: Path) -> Path:
    """A copy of an adapter, to be spoilt."""
    folder = tmp_path / "one"
    folder.mkdir()
    for path in (trained.folder / "dora").glob("adapter_*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def configured(folder: Path, **change: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


FIRST = "base_model.model.model.layers.0.self_attn.q_proj."
A = torch.ones(3, 48)
# What is written in the place of which tensor (none: it is taken out), and what is told of it.
SPOILT: list[tuple[str, torch.Tensor | None, str]] = [
    (f"{FIRST}lora_B.weight", None, r"lacks the tensor 'base_model.*layers\.0\.self_attn\.q_proj\.lora_B"),
    (f"{FIRST}lora_magnitude_vector", None, r"lacks the tensor '.*lora_magnitude_vector'"),
    (f"{FIRST.replace('q_proj', 'v_proj')}lora_A.weight", A, r"v_proj\.lora_A\.weight' that the adapter"),
    (f"{FIRST.replace('layers.0', 'layers.7')}lora_A.weight", A, r"layers\.7\.self_attn\.q_proj.*no use for"),
    (f"{FIRST}lora_A.weight", torch.ones(3, 40), r"q_proj\.lora_A\.weight \(3, 40\) in place of \(3, 48\)"),
    (f"{FIRST}lora_A.weight", A * math.nan, "not finite"),
    ("base_model.model.model.norm.weight", torch.ones(48), "no low-rank updates"),
    ("base_model.model.lm_head.lora_A.weight", A, "lm_head; changed here are"),
    ("base_model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight", A, r"vision_tower\.encoder\.layers.*; changed here"),
    (f"{FIRST.replace('model.model.model', 'model.model')}lora_A.weight", A, "by 2 names"),
]


@pytest.mark.parametrize(("name", "tensor", "told"), SPOILT)
def test_missing_extra_and_misshapen_tensors_are_named(
    trained: Trained, one: Path, name: str, tensor: torch.Tensor | None, told: str
) -> None:
    tensors = load_file(one / "adapter_model.safetensors")
    others = {their: value for their, value in tensors.items() if their != name}
    save_file(others if tensor is None else {**others, name: tensor}, one / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=told):
        read_adapter(one, trained.decoder)


def test_a_file_without_tensors_is_told(trained: Trained, one: Path) -> None:
    save_file({}, one / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="holds no tensors"):
        read_adapter(one, trained.decoder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save is \['embed_tokens'\]"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"something_new": "on"}, "something_new is 'on'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'.*converts"),
        ({"layers_pattern": "blocks"}, "layers_pattern"),
        ({"r": 0}, "r is 0"),
        ({"r": 10**6}, "from 1 to 4096"),
        ({"r": "8"}, "a whole number"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "(.*"}, "no regular expression"),
        ({"target_modules": r"(.|.)*[0-9]"}, "takes too long"),
    ],
)
def test_settings_that_are_not_done_here_are_named(trained: Trained, one: Path, change: dict[str, object], told: str) -> None:
    configured(one, **change)
    with pytest.raises(ModelError, match=told):
        read_adapter(one, trained.decoder)


def test_a_pickle_is_never_opened_and_a_folder_that_is_none_is_told(trained: Trained, one: Path, tmp_path: Path) -> None:
    (one / "adapter_model.safetensors").unlink()
    (one / "adapter_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(WeightsError, match=r"no adapter_model\.safetensors.*adapter_model\.bin.*never opened"):
        read_adapter(one, trained.decoder)
    with pytest.raises(WeightsError, match=r"no adapter_config\.json"):
        read_adapter(tmp_path, trained.decoder)
    (one / "adapter_config.json").write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ModelError, match="bytes"):
        read_adapter(one, trained.decoder)
