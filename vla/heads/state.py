"""A robot's state on its way into a network: padded to the network's width, or spelt out as bins in the prompt."""

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import InputError

__all__ = ["bins_of_state", "fast_prompt", "padded", "pi0_prompt", "pi05_prompt"]

_BINS = 256


def padded(state: Float[Tensor, " p"], width: int) -> Float[Tensor, " w"]:
    """The state with zeros behind it; a width of 0 is a network that takes none. Raises InputError where it is too long or not finite."""
    if not bool(state.isfinite().all()):
        raise InputError(f"it is not finite: {state.tolist()}", item="state")
    if not width:
        return state[:0]
    if state.shape[0] > width:
        raise InputError(f"it has {state.shape[0]} numbers, the network takes at most {width}", item="state")
    return torch.nn.functional.pad(state, (0, width - state.shape[0]))


def bins_of_state(state: Float[Tensor, " p"]) -> list[int]:
    """The bin of each number, 256 of equal width on [-1, 1] from 0; as published, what lies below -1 is bin -1, above 1 bin 255.

    Raises InputError for a number that is not finite: openpi takes it for bin 255.
    """
    if not bool(state.isfinite().all()):
        raise InputError(f"it is not finite: {state.tolist()}", item="state")
    edges = torch.linspace(-1, 1, _BINS + 1, dtype=torch.float64)[:-1]
    bins: list[int] = (torch.bucketize(state.double().cpu(), edges, right=True) - 1).tolist()
    return bins


def pi0_prompt(instruction: str) -> str:
    """What pi0 reads after its start token. Its last newline is a token of its own."""
    return f"{_clean(instruction)}\n"


def pi05_prompt(instruction: str, state: Float[Tensor, " p"]) -> str:
    """What pi0.5 reads: the instruction and the quantile-normalised state, at most 200 tokens with the start token."""
    return f"Task: {_clean(instruction)}, State: {_spelt(state)};\nAction: "


def fast_prompt(instruction: str, state: Float[Tensor, " p"]) -> str:
    """What pi0-FAST reads and sees both ways; it then says "Action: ", the action tokens and "|"."""
    cleaned = instruction.lower().strip().replace("_", " ")
    return f"Task: {cleaned}, State: {_spelt(state)};\n"


def _clean(instruction: str) -> str:
    return instruction.strip().replace("_", " ").replace("\n", " ")


def _spelt(state: Float[Tensor, " p"]) -> str:
    return " ".join(map(str, bins_of_state(state)))
