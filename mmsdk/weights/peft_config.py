"""What an adapter's own settings say (PEFT's adapter_config.json, LoRA and its kin), read strictly: what would change an answer and is not
done here is refused by name.

| setting | here |
| --- | --- |
| `r`, `rank_pattern`, `lora_alpha`, `alpha_pattern`, `use_rslora`, `use_dora` | as in PEFT |
| `target_modules` (names, a regular expression, "all-linear"), `exclude_modules`, `layers_to_transform` | as in PEFT |
| `fan_in_fan_out` | makes no difference: no matrix here is stored transposed |
| `bias` | "none" alone |
| `init_lora_weights` | what starts from other base weights (PiSSA, OLoRA, LoftQ, ...) must be converted to plain LoRA |
| `modules_to_save`, and whatever else is switched on | refused |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import regex

from mmsdk.errors import ModelError
from mmsdk.weights.fields import Fields

__all__ = ["LoraConfig", "lora_config"]

MOST_RANK = 4096
ALL_LINEAR = "all-linear"
# Seconds for one expression on one name, which has some dozens of letters: an honest one takes microseconds.
_PATIENCE = 0.25

_READ = """peft_type r rank_pattern lora_alpha alpha_pattern use_rslora use_dora target_modules exclude_modules layers_to_transform
layers_pattern bias init_lora_weights fan_in_fan_out"""
# Told for people, used in training alone, or knobs of what is switched off elsewhere.
_IDLE = """base_model_name_or_path revision task_type auto_mapping inference_mode peft_version lora_dropout loftq_config eva_config
corda_config lora_ga_config megatron_config megatron_core qalora_group_size runtime_config ensure_weight_tying"""
_KNOWN = frozenset(_READ.split()) | frozenset(_IDLE.split())
# These begin where plain LoRA does, with the base weights as they are.
_PLAIN_STARTS = (True, False, "true", "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """`targets` and `excluded` are names of modules or one expression; `layers` are the numbers of those changed, all where empty."""

    where: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] = ()
    rslora: bool = False
    dora: bool = False

    def changes(self, module: str, layer: int) -> bool:
        """Whether the adapter changes a module of this name, in this layer."""
        if self._named(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        # layers are chosen among names, not where an expression says it all
        chosen = not self.layers or isinstance(self.targets, str) or layer in self.layers
        return chosen and self._named(self.targets, module)

    def rank_of(self, module: str) -> int:
        """The rank of a module's update."""
        return self.ranks.get(self._first(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What the update is multiplied by."""
        alpha, rank = self.alphas.get(self._first(self.alphas, module), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _named(self, names: tuple[str, ...] | str, module: str) -> bool:
        if isinstance(names, str):
            return bool(names) and self._matches(names, module)
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _first(self, patterns: Mapping[str, object], module: str) -> str:
        """The first of the patterns that is the end of the name, from a dot on; the name itself where none is."""
        return next((pattern for pattern in patterns if self._matches(rf"(.*\.)?({pattern})", module)), module)

    def _matches(self, pattern: str, module: str) -> bool:
        try:
            return regex.fullmatch(pattern, module, timeout=_PATIENCE) is not None
        except regex.error as error:
            raise ModelError(f"{self.where}: {pattern!r} is no regular expression: {error}") from None
        except TimeoutError:
            raise ModelError(f"{self.where}: the expression {pattern!r} takes too long on a name like {module!r}") from None


def lora_config(fields: Fields) -> LoraConfig:
    """The settings. Raises ModelError, naming the setting, for an adapter of another kind and for what is not done here."""
    _refuse(fields)
    rank = _ranked(fields, "r", fields.whole("r", 8))
    ranks = {name: _ranked(fields, "rank_pattern", size) for name, size in _numbers(fields, "rank_pattern").items()}
    targets = _names(fields, "target_modules")
    if not targets:
        raise fields.wrong("target_modules", "names of modules, a regular expression or 'all-linear'")
    return LoraConfig(
        where=fields.where,
        rank=rank,
        alpha=fields.real("lora_alpha", 8.0),
        ranks=MappingProxyType(ranks),
        alphas=MappingProxyType(_numbers(fields, "alpha_pattern")),
        targets=ALL_LINEAR if isinstance(targets, str) and targets.lower() == ALL_LINEAR else targets,
        excluded=_names(fields, "exclude_modules"),
        layers=fields.wholes("layers_to_transform"),
        rslora=fields.flag("use_rslora", default=False),
        dora=fields.flag("use_dora", default=False),
    )


def _refuse(fields: Fields) -> None:
    if fields.text("peft_type", "") != "LORA":
        raise fields.wrong("peft_type", "'LORA': other kinds of adapters are not supported")
    if fields.text("bias", "none") != "none":
        raise fields.wrong("bias", "'none': trained biases are not supported")
    start = fields.values.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise fields.wrong("init_lora_weights", f"one of {', '.join(map(str, _PLAIN_STARTS))}; PEFT converts the others when it saves them")
    layers = fields.values.get("layers_pattern")
    if layers and "layers" not in (layers if isinstance(layers, list) else [layers]):
        raise fields.wrong("layers_pattern", "absent, or 'layers'")
    for name in fields.values.keys() - _KNOWN:
        if fields.values[name] not in (None, False, [], {}):
            raise fields.wrong(name, "absent: it is not supported")


def _ranked(fields: Fields, name: str, size: int | float) -> int:
    if not 1 <= size <= MOST_RANK or size != int(size):
        raise fields.wrong(name, f"ranks from 1 to {MOST_RANK}")
    return int(size)


def _numbers(fields: Fields, name: str) -> dict[str, float]:
    group = fields.group(name)
    return {key: group.real(key) for key in group.values}


def _names(fields: Fields, name: str) -> tuple[str, ...] | str:
    value = fields.values.get(name)
    if isinstance(value, str):
        return value
    if value is None:
        return ()
    if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise fields.wrong(name, "a list of names, or an expression")
    return tuple(str(one) for one in value)
