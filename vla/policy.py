"""A model as a policy for one robot: adapted in names and units, normalised both ways, padded to its width and cut to the robot's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mmsdk.errors import ModelError
from mmsdk.vla.adapt import Absent, Adapter, Names
from mmsdk.vla.contract import Contract
from mmsdk.vla.lint import Normalization, lint, not_finite, plain_columns
from mmsdk.vla.normalize import Normalizer
from mmsdk.vla.origin import Origin, prove
from mmsdk.vla.types import ActionChunk, Request

__all__ = ["Model", "RobotPolicy", "load_policy"]


@runtime_checkable
class Model(Protocol):
    """What a policy network is, without any robot: normalised in, normalised out, at its own width.

    It gets `Request.observation.state` and `Request.pending` normalised and padded with zeros, and answers with a chunk as wide.
    """

    def reset(self, episode: int) -> None:
        """A new episode begins."""
        ...

    def __call__(self, request: Request) -> ActionChunk: ...


@dataclass(frozen=True, slots=True)
class RobotPolicy:
    """A `Policy` in the robot's names and units around a model that knows neither. Built by `load_policy`."""

    model: Model
    adapter: Adapter
    state: Normalizer
    action: Normalizer
    width: int

    def reset(self, episode: int) -> None:
        """See `Policy`."""
        self.model.reset(episode)

    def __call__(self, request: Request) -> ActionChunk:
        """See `Policy`. Raises ModelError where the model answers with another width than its own, SafetyError where not finite."""
        seen = request.observation
        observation = self.adapter.observation(seen)
        observation = replace(observation, state=self._padded(self.state(observation.state[None]))[0])
        pending = self._padded(self.action(self.adapter.pending(request.pending, seen.state)))
        chunk = self.model(replace(request, observation=observation, pending=pending))
        size = self.adapter.policy.action_size
        if chunk.actions.shape[1] != (self.width or size):
            told = f"the model answers with {chunk.actions.shape[1]} numbers an action, expected {self.width or size}"
            raise ModelError(f"{told}; none is made up")
        actions = self.action.inverse(chunk.actions[:, :size].double())
        return replace(chunk, actions=self.adapter.actions(actions, seen.state))

    def _padded(self, values: Float[Tensor, "n i"]) -> Float[Tensor, "n o"]:
        return torch.nn.functional.pad(values, (0, self.width - values.shape[1])) if self.width else values


def load_policy(
    model: Model,
    policy: Contract,
    robot: Contract,
    normalization: Normalization,
    names: Names = Names(),
    absent: Absent = "refuse",
    weights: Mapping[str, Tensor] | None = None,
    samples: Float[Tensor, "b p"] | None = None,
    origin: Origin | None = None,
) -> RobotPolicy:
    """Put a model to work on a robot, or say why not.

    `samples` are states that the robot has reported while it moved, at least 20: with them it is proved that what it sends is not
    normalised already. `origin` is what the checkpoint was made with, and one answer that it must still give. Raises ModelError with the
    linter's table where statistics or samples do not fit the policy's contract, where the answer differs, and naming tensors among
    `weights` that are not finite; InputError where the two contracts do not match. Warns of versions that differ.
    """
    broken = not_finite(weights or {})
    if broken:
        raise ModelError(f"weights with NaN or infinity: {', '.join(broken)}")
    adapter = Adapter(policy, robot, names, absent)
    rows = [] if samples is None else [adapter.state(row) for row in samples]
    seen = torch.stack(rows) if rows else torch.zeros(0, policy.state_size)
    lint(policy, normalization, {} if samples is None else {"state": seen}).require()
    if origin is not None:
        prove(model, origin)
    commands = [command.feature for command in policy.action]
    plain = plain_columns(policy.state, normalization.plain), plain_columns(commands, normalization.plain)
    state = Normalizer.of(normalization.state, normalization.statistics.get("state", {}), plain[0], normalization.eps, "state")
    action = Normalizer.of(normalization.action, normalization.statistics.get("action", {}), plain[1], normalization.eps, "action")
    return RobotPolicy(model, adapter, state, action, normalization.width)
