"""Adapters in a pipeline and in an engine: what PEFT's own model of a whole VLM says, row by row, streamed, sampled, remembered, merged."""

import copy
import dataclasses
import gc
import math
import re
import shutil
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from mmsdk.adapters import Adapters, AdapterSpec, Worn
from mmsdk.answer import Answer
from mmsdk.apps.checkpoints.seeing import WRITERS, compared
from mmsdk.apps.checkpoints.sight import SightReplica
from mmsdk.decoder.adapted import AdaptedLinear
from mmsdk.errors import InputError, ModelError
from mmsdk.generate.config import GenerationConfig
from mmsdk.pipeline import Pipeline, pipeline
from mmsdk.prompt import Prompt, Text
from mmsdk.recall import recalling
from mmsdk.serve.engine import Engine
from mmsdk.vision.types import Image

# PEFT asks transformers in words that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
LANGUAGE = r".*language_model.*\.(q_proj|v_proj|gate_proj|down_proj)"
KINDS = {
    "style": {"r": 4, "lora_alpha": 8, "target_modules": LANGUAGE},
    "domain": {"r": 2, "lora_alpha": 4, "use_dora": True, "target_modules": r".*language_model.*\.(k_proj|o_proj|up_proj)"},
    "sight": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "look": {"r": 3, "use_dora": True, "target_modules": r".*(vision_tower.*(k_proj|out_proj|fc1|fc2)|multi_modal_projector.linear_[12])"},
}
QUESTION, TOKENS = "What is left of the ball?", 8
PICTURE = Image(torch.randint(0, 256, (3, 40, 56), generator=torch.Generator().manual_seed(5), dtype=torch.uint8), "picture")
LONG = "Which of all these many things that can be seen there is the largest one, and which one is the smallest?"


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """LLaVA as transformers and PEFT have it, and as we do."""

    folder: Path
    models: dict[str, SightReplica]
    pipe: Pipeline


def peft(folder: Path, replica: SightReplica, kind: str, seed: int) -> SightReplica:
    """An adapter over a model of its own, saved; the model with it."""
    parts = SightReplica.write("llava", folder / f"under {kind}").parts
    model: Any = get_peft_model(parts.model, LoraConfig(**KINDS[kind])).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "magnitude" in name:
                weight.mul_(0.5 + torch.rand(weight.shape, generator=generator))
            elif "lora_" in name:
                weight.normal_(0, 0.2, generator=generator)
    model.save_pretrained(folder / kind)
    return dataclasses.replace(replica, parts=dataclasses.replace(parts, model=model))


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Beside:
    folder = tmp_path_factory.mktemp("adapters")
    replica = SightReplica.write("llava", folder / "base")
    models = {kind: peft(folder, replica, kind, seed) for seed, kind in enumerate(KINDS, start=1)}
    pipe = pipeline(model=folder / "base", dtype="float32")
    for kind in KINDS:
        pipe.load_adapter(folder / kind, kind)
    return Beside(folder, models, pipe)


def alone(beside: Beside, adapter: AdapterSpec, question: str = QUESTION, tokens: int = TOKENS) -> Answer:
    return beside.pipe(PICTURE, question, max_tokens=tokens, adapter=adapter)


def wearing(pipe: Pipeline, spec: AdapterSpec) -> Any:
    """The model whose parts have the adapters."""
    worn = pipe.adapters.worn(spec, 1)
    eye: Any = worn.eye(pipe.vlm, 0)
    return dataclasses.replace(eye, decoder=worn.decoder(pipe.vlm.decoder, [0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_sight_says_what_it_says_with_peft(beside: Beside, kind: str) -> None:
    replica = beside.models[kind]
    for prompt in (Prompt((PICTURE, Text(QUESTION))), Prompt((Text("What is two and two?"),))):
        found = compared(replica, wearing(beside.pipe, kind), prompt, 32)
        assert found.apart <= 1e-4 and found.same
    said = replica.tokenizer.decode(replica.says(Prompt((PICTURE, Text(QUESTION))), TOKENS), skip_special_tokens=True)
    assert alone(beside, kind).startswith(said.strip()[:4]) and alone(beside, kind) != alone(beside, "")


def test_loading_changes_nothing_for_who_asks_without(beside: Beside) -> None:
    bare = Pipeline(beside.pipe.vlm)
    assert alone(beside, "") == alone(beside, {}) == bare(PICTURE, QUESTION, max_tokens=TOKENS)
    assert not any(isinstance(module, AdaptedLinear) for module in beside.pipe.vlm.decoder.modules())
    assert beside.pipe.adapters.worn("", 3).decoder(beside.pipe.vlm.decoder, [0, 2]) is beside.pipe.vlm.decoder


@pytest.mark.parametrize("family", sorted(WRITERS.keys() - {"llava", "llava_next_video"}))
def test_every_matrix_of_other_families_is_peft_s(family: str, tmp_path: Path) -> None:
    """Towers of all shapes, mergers of the layers in between, projectors within the encoder; LoRA, DoRA, and merged weights."""
    replica: Any = WRITERS[family](tmp_path / "base")
    model: Any = replica.model if family.startswith("qwen") else replica.parts.model
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"), "plain")
    model.add_adapter("dora", LoraConfig(r=2, target_modules="all-linear", use_dora=True))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "magnitude" in name:
                weight.mul_(0.75 + 0.5 * torch.rand(weight.shape, generator=generator))
            elif "lora_" in name:
                weight.normal_(0, 0.2, generator=generator)
    model.save_pretrained(tmp_path)
    pipe = pipeline(model=tmp_path / "base", dtype="float32")
    for kind in ("plain", "dora"):
        pipe.load_adapter(tmp_path / kind, kind)
        model.set_adapter(kind)
        for vlm in (wearing(pipe, kind), *([pipe.merge(kind).vlm] if kind == "plain" else [])):
            found = compared(replica, vlm, Prompt((PICTURE, Text(QUESTION))), 2)
            assert found.apart <= 1e-3 and found.same


def test_a_deep_copy_knows_the_same_adapters_and_forgets_alone(beside: Beside) -> None:
    twin = copy.deepcopy(beside.pipe)
    assert twin.adapters.names == beside.pipe.adapters.names and twin.vlm.decoder is not beside.pipe.vlm.decoder
    assert all(twin(PICTURE, QUESTION, max_tokens=TOKENS, adapter=kind) == alone(beside, kind) for kind in ("style", "sight"))
    twin.unload_adapter("style")
    assert "style" in beside.pipe.adapters.names


SPECS: list[AdapterSpec] = ["style", "sight", "", "domain", {"style": 0.5, "domain": 1.0}, {"style": -1.0}, {"sight": 0.5, "look": 1.0}]


def test_rows_of_a_batch_each_have_their_own(beside: Beside) -> None:
    """In groups of three, with an item among them that cannot be answered."""
    pipe = dataclasses.replace(beside.pipe, batch_size=3)
    seen, read = (PICTURE, QUESTION), ([], "What?")
    items: list[Any] = [seen, seen, read, seen, seen, read, seen]
    wanted = [beside.pipe(*item, max_tokens=TOKENS, adapter=spec) for item, spec in zip(items, SPECS, strict=True)]
    assert len(set(map(str, wanted))) == len(wanted)
    assert pipe(items, max_tokens=TOKENS, adapter=SPECS) == wanted
    items.insert(1, ("nowhere.png", QUESTION))
    found = pipe(items, max_tokens=TOKENS, adapter=[SPECS[0], "domain", *SPECS[1:]])
    assert isinstance(found.pop(1), InputError) and found == wanted
    assert pipe(items[2:], max_tokens=TOKENS, adapter="style")[0] == wanted[0]


def test_streams_and_several_answers_have_it_too(beside: Beside) -> None:
    spec: AdapterSpec = {"style": 0.5, "domain": 1.0}
    assert "".join(beside.pipe.stream(PICTURE, QUESTION, max_tokens=TOKENS, adapter=spec)) == alone(beside, spec)
    drawn = beside.pipe(PICTURE, QUESTION, n=3, temperature=0.9, seed=4, max_tokens=TOKENS, adapter=spec)
    assert drawn == [beside.pipe(PICTURE, QUESTION, temperature=0.9, seed=4 + i, max_tokens=TOKENS, adapter=spec) for i in range(3)]


def test_what_is_remembered_is_remembered_for_these_adapters_alone(beside: Beside) -> None:
    """CS-14: found again with the same ones, never with others, with other weights of the same, without, or in merged weights."""
    pipe = dataclasses.replace(beside.pipe, recall=recalling("paged"))
    sizes = list[int]()
    for spec in ("", "style", {"style": -1.0}, {"style": 0.5, "domain": 1.0}, {"domain": 1.0, "style": 0.5}, "look", {"sight": 0.5}):
        cold, warm = (pipe(PICTURE, LONG, max_tokens=4, adapter=spec) for _ in range(2))
        assert cold == warm == alone(beside, spec, LONG, 4)
        assert cold.tokens.recalled == 0 < warm.tokens.recalled
        sizes.append(pipe.recall.sights.nbytes)
    assert [size // sizes[0] for size in sizes] == [1, 1, 1, 1, 1, 2, 3], "a picture is encoded once for all that look at it alike"
    merged, told = pipe.merge("style"), []
    for one in (pipe, merged, merged, pipe):
        told.append(one(PICTURE, LONG, max_tokens=1).tokens.recalled > 0)
    assert told[1:] == [False, True, True]


def test_a_picture_encoded_before_is_asked_about_with_what_encoded_it(beside: Beside) -> None:
    """Whatever changes the language model alone may be chosen freely."""
    pipe, plain = beside.pipe, beside.pipe.encode(PICTURE)
    for spec in ("look", {"sight": 0.5, "look": 1.0}):
        assert pipe(pipe.encode(PICTURE, adapter=spec), QUESTION, max_tokens=TOKENS, adapter=spec) == alone(beside, spec)
        with pytest.raises(InputError, match=r"was encoded by .*encode it by this one"):
            pipe(plain, QUESTION, adapter=spec)
    with pytest.raises(InputError, match="was encoded by .* with look"):
        pipe(pipe.encode(PICTURE, adapter="look"), QUESTION)
    assert pipe(plain, QUESTION, max_tokens=TOKENS, adapter="style") == alone(beside, "style")


def test_a_name_that_is_given_anew_means_another_adapter(beside: Beside) -> None:
    pipe = dataclasses.replace(beside.pipe, recall=recalling("paged"), adapters=Adapters())
    pipe.load_adapter(beside.folder / "style", "it")
    first = pipe(PICTURE, LONG, max_tokens=4, adapter="it")
    pipe.load_adapter(beside.folder / "domain", "it")
    again = pipe(PICTURE, LONG, max_tokens=4, adapter="it")
    assert (first, again) == (alone(beside, "style", LONG, 4), alone(beside, "domain", LONG, 4)) and again.tokens.recalled == 0


def test_merged_weights_answer_as_the_adapter_does_and_the_others_stay(beside: Beside) -> None:
    before = alone(beside, "")
    merged = beside.pipe.merge({"style": 0.5, "domain": 1.0})
    assert merged(PICTURE, QUESTION, max_tokens=TOKENS) == alone(beside, {"style": 0.5, "domain": 1.0})
    assert alone(beside, "") == before and merged.adapters.names == ()
    merged.load_adapter(beside.folder / "style", "more")
    assert merged(PICTURE, QUESTION, max_tokens=TOKENS, adapter="more") == beside.pipe.merge({"style": 1.5, "domain": 1.0})(
        PICTURE, QUESTION, max_tokens=TOKENS
    )


def test_requests_of_an_engine_each_have_their_own(beside: Beside) -> None:
    pipe = beside.pipe
    engine = Engine(pipe, rows=3, chunk=48)
    wanted = [alone(beside, spec, LONG, 3 + place) for place, spec in enumerate(SPECS)]
    for _ in range(2):
        numbers = [engine.submit([PICTURE], LONG, GenerationConfig(max_tokens=3 + place), adapter=spec) for place, spec in enumerate(SPECS)]
        wrong = engine.submit([PICTURE], QUESTION, adapter="nobody")
        outcomes = engine.drain()
        assert [outcomes[number].text for number in numbers] == wanted
        assert isinstance(outcomes[wrong].finish, InputError) and engine.held == 0


def test_what_is_not_changed_here_is_refused_by_name(beside: Beside, tmp_path: Path) -> None:
    """A convolution, a layer that the tower does not have, another model's eyes."""
    tensors = load_file(beside.folder / "sight" / "adapter_model.safetensors")
    shutil.copy(beside.folder / "sight" / "adapter_config.json", tmp_path)
    old = next(name for name in tensors if "vision_tower" in name and "q_proj.lora_A" in name)
    for new in (re.sub(r"encoder.*(?=\.lora)", "embeddings.patch_embedding", old), old.replace("layers.0", "layers.9")):
        save_file({new if name == old else name: tensor for name, tensor in tensors.items()}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=re.escape(new.removeprefix("base_model.model.").partition(".lora")[0])):
            beside.pipe.load_adapter(tmp_path, "other")
    save_file({name: tensor for name, tensor in tensors.items() if name != old}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"lacks the tensor '{re.escape(old)}'"):
        beside.pipe.load_adapter(tmp_path, "other")


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("stile", "no adapter 'stile' is loaded; did you mean 'style'"),
        ("?", r"no adapter '\?' is loaded; there is style, domain, sight, look"),
        ({"style": math.nan}, "nan is no weight for 'style'"),
        ({"domain": 0.5}, "'domain' is a DoRA adapter, which is taken whole"),
        (["style", "domain"], "it names 2 for 1 rows"),
    ],
)
def test_what_cannot_be_worn_is_told(beside: Beside, spec: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        beside.pipe.adapters.worn(spec, 1)


def test_names_come_and_go(beside: Beside) -> None:
    pipe = dataclasses.replace(beside.pipe, adapters=Adapters())
    for name in ("", "  ", "x" * 300):
        with pytest.raises(InputError, match="no name for an adapter"):
            pipe.load_adapter(beside.folder / "style", name)
    pipe.load_adapter(beside.folder / "style", "it")
    assert pipe.adapters.names == ("it",)
    pipe.unload_adapter("it")
    with pytest.raises(InputError, match="there is none"):
        pipe.unload_adapter("it")


def test_what_sees_with_an_adapter_goes_when_it_is_unloaded(beside: Beside) -> None:
    """Also when its name is given anew. An answer under way still sees with it, and nothing is kept of that."""
    pipe = dataclasses.replace(beside.pipe, adapters=Adapters())
    for kind in ("look", "sight"):
        pipe.load_adapter(beside.folder / kind, kind)

    def tower(worn: Worn) -> weakref.ref[Any]:
        eye: Any = worn.eye(pipe.vlm, 0)
        assert worn.eye(pipe.vlm, 0) is eye
        return weakref.ref(eye.encoder.backbone.vit)

    looks, both = pipe.adapters.worn("look", 1), pipe.adapters.worn({"look": 1.0, "sight": 0.5}, 1)
    made, other = [tower(worn) for worn in (looks, both)], tower(pipe.adapters.worn("sight", 1))
    pipe.load_adapter(beside.folder / "style", "style")
    gc.collect()
    assert all(one() is not None for one in (*made, other))
    pipe.unload_adapter("look")
    gc.collect()
    assert all(one() is None for one in made) and other() is not None
    late: Any = looks.eye(pipe.vlm, 0)
    again, name = weakref.ref(late.encoder.backbone.vit), late.name
    assert "look" in name
    pipe.load_adapter(beside.folder / "look", "sight")
    del late
    gc.collect()
    assert again() is None and other() is None


def test_two_threads_that_ask_for_one_eye_get_the_same_one(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, made = dataclasses.replace(beside.pipe, adapters=Adapters()), list[Any]()
    pipe.load_adapter(beside.folder / "sight", "sight")
    module = sys.modules[Adapters.__module__]
    looking = vars(module)["_looking"]

    def slowly(*parts: Any) -> Any:
        time.sleep(0.1)
        made.append(looking(*parts))
        return made[-1]

    monkeypatch.setattr(module, "_looking", slowly)
    worn = pipe.adapters.worn("sight", 1)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: worn.eye(pipe.vlm, 0), range(2))
    assert one is other is made[0] and len(made) == 1
