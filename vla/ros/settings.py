"""What a policy node is told in its parameter file, besides its topics (`mmsdk.vla.ros.binding.declared`).

contract    the robot's contract: a file, beside the parameter file where its path is relative, or the YAML text itself
policy      FILE.py:NAME, a function that gives a `mmsdk.vla.wire.service.Service`, or ws://HOST:PORT of `mmsdk robot serve`
kinematics  FILE.py:NAME of the forward kinematics, where the contract declares a workspace
"""

from pathlib import Path

from mmsdk.vla.chunk_check import OnViolation
from mmsdk.vla.contract import Contract
from mmsdk.vla.contract_file import load_contract, parse_contract
from mmsdk.vla.drive import PlanName, Settings
from mmsdk.vla.loop import Pace
from mmsdk.vla.ros.parameters import Parameter, Parameters

__all__ = ["NODE", "contract_of", "settings_of"]

_PLANS: tuple[PlanName, ...] = ("receding", "ensemble")
_VIOLATIONS: tuple[OnViolation, ...] = ("clamp", "truncate", "refuse")
_PACE = Pace()
_LONGEST = 1_000_000.0

NODE = (
    Parameter("contract", "string", "", "the robot's contract: a path, or YAML text", read_only=True),
    Parameter("policy", "string", description="FILE.py:NAME of a Service, or ws://HOST:PORT", read_only=True),
    Parameter("kinematics", "string", "", "FILE.py:NAME of forward kinematics, for a workspace", read_only=True),
    Parameter("instruction", "string", "", "what the robot is to do; may be changed while it runs"),
    Parameter("use_sim_time", "bool", False, "go by /clock", read_only=True),
    Parameter("autostart", "bool", True, "configure and activate at once", read_only=True),
    Parameter("plan", "string", "receding", "what becomes of chunks that overlap", choices=_PLANS, read_only=True),
    Parameter("on_violation", "string", "clamp", "what becomes of a chunk that breaks limits", choices=_VIOLATIONS, read_only=True),
    Parameter("pace.expert", "integer", _PACE.expert, "ticks between requests", low=1.0, high=_LONGEST, read_only=True),
    Parameter("pace.adapter", "integer", _PACE.adapter, "ticks between runs of the adapter", low=1.0, high=_LONGEST, read_only=True),
    Parameter("pace.vlm", "integer", _PACE.vlm, "ticks between runs of the VLM", low=1.0, high=_LONGEST, read_only=True),
    Parameter("pace.deadline", "double", _PACE.deadline, "seconds that an answer may take", low=1e-3, high=_LONGEST, read_only=True),
    Parameter("pace.warm_up", "integer", _PACE.warm_up, "answers before anything moves", low=0.0, high=_LONGEST, read_only=True),
    Parameter("pace.cold", "double", _PACE.cold, "seconds that each of those may take", low=1e-3, high=_LONGEST, read_only=True),
    Parameter("pace.patience", "integer", _PACE.patience, "punctual answers that give work back", low=1.0, high=_LONGEST, read_only=True),
    Parameter("pace.seed", "integer", _PACE.seed, "request n has the seed of this plus n", low=0.0, high=2.0**31, read_only=True),
)


def contract_of(text: str, beside: Path) -> Contract | None:
    """The contract that the parameter names, None where it names none: the policy's own is then the robot's. Raises InputError."""
    if not text.strip():
        return None
    return parse_contract(text) if "\n" in text.strip() else load_contract(beside / text.strip())


def settings_of(parameters: Parameters) -> Settings:
    """How the loop runs. Raises InputError where the parameters do not declare it, or a pace is none."""
    whole = {name: int(parameters.number(f"pace.{name}")) for name in ("expert", "adapter", "vlm", "warm_up", "patience", "seed")}
    pace = Pace(deadline=parameters.number("pace.deadline"), cold=parameters.number("pace.cold"), **whole)
    (plan,) = [name for name in _PLANS if name == parameters.text("plan")]
    (on_violation,) = [name for name in _VIOLATIONS if name == parameters.text("on_violation")]
    return Settings(pace, plan, on_violation)
