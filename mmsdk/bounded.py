"""What may be a stream without end, and what holds it: all that can be told before anything of it is read (`mmsdk.stream`)."""

from dataclasses import dataclass

from mmsdk import plugins
from mmsdk.attention.mla import Latent
from mmsdk.compress import Compression, named
from mmsdk.decoder.rope import Dynamic, LongRope
from mmsdk.errors import BudgetError, InputError, ModelError, PluginError
from mmsdk.fitting import lengths
from mmsdk.kv.policies.full import Full
from mmsdk.kv.policy import Evictor, Gapless, Reader, Storer
from mmsdk.kv.policy_memory import POLICIES, PolicyMemory, policy_of
from mmsdk.models.types import VLM
from mmsdk.vision.values import shown

__all__ = ["USUAL", "Room", "bounding", "check_memory", "check_model", "usual"]

USUAL = "streaming:1024"
"""How a stream is held where nobody says; by a model whose context is no longer, half its context."""


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens of a stream are held, and how many frames come at one time; of how many tokens these are, before they are read."""

    vlm: VLM
    compression: Compression
    hold: int
    window: int

    def check(self, size: tuple[int, int]) -> None:
        """Raises InputError where a full window of frames of this size (height, width) is more than is held."""
        new = self._tokens(size, self.window)
        if new > self.hold:
            held = [few for few in range(2, self.window) if self._tokens(size, few) <= self.hold]
            fewer = f", or take fewer frames together: window={held[-1]}" if held else f": two frames are {self._tokens(size, 2)}"
            raise self.refusal(new, fewer)

    def refusal(self, new: int, fewer: str = "") -> InputError:
        """What is told of so many tokens at one time; `fewer` is the last of its advice, where it is known which window would be held."""
        told = f"{new} tokens come at one time, and {self.hold} are held; hold more, compress more"
        return InputError(told + (fewer or f", or take fewer frames together: a window= below {self.window}"), item="stream")

    def _tokens(self, size: tuple[int, int], frames: int) -> int:
        """Visual tokens that go into the decoder of so many frames; none that a target of time decides about."""
        if self.compression.aimed:
            return 0
        return lengths(self.compression.at_most(), [self.vlm.encoder.count(size, frames)], 0, 1)[0]


def bounding(kv: str | None) -> tuple[PolicyMemory, int]:
    """The memory of a stream by its name (None is `USUAL`), and how many tokens it holds.

    Raises PluginError for what is no policy, and for one that lets go of nothing, or of the prompt's tokens alone, BudgetError for a share.
    """
    kv, known = USUAL if kv is None else kv, plugins.available(POLICIES)
    if not isinstance(kv, str):
        raise PluginError(f'kv: {shown(kv)} names no memory; write a policy with the tokens that it holds, such as "{USUAL}"')
    if (name := plugins.parse(kv).name) not in known:
        told = f'choose a policy with what it holds ("{USUAL}"): {", ".join(known)}'
        raise PluginError(f"{kv!r} bounds no stream; {plugins.near(name, known)}{told}")
    memory = policy_of(kv)
    policy, amount = memory.policy, memory.amount
    prompts = (isinstance(policy, Evictor) and not policy.interval) or (isinstance(policy, Storer) and not policy.bounds)
    if isinstance(policy, Evictor) and policy.dense:
        raise PluginError(f"{kv!r}: dense={policy.dense} layers would keep all of a stream; leave dense out")
    if isinstance(policy, Reader) or prompts:
        told = f"{name} lets go of nothing while a stream goes on"
        knob = f", or write {name}:512,interval=1" if isinstance(policy, Evictor) and not isinstance(policy, Full) else ""
        raise PluginError(f"{told}; choose another policy{knob}")
    if not isinstance(amount, int):
        raise BudgetError(f"{kv!r}: a stream has no length to hold a share of; write a whole number of tokens")
    return memory, amount


def usual(vlm: VLM) -> str:
    """The memory of a stream of this model where nobody names one."""
    asked = plugins.parse(USUAL)
    return USUAL if int(asked.amount) < vlm.context else f"{asked.name}:{max(5, vlm.context // 2)}"


def check_model(vlm: VLM, compression: Compression) -> None:
    """Raises PluginError for a compression that cannot work on a stream, ModelError for a model whose keys cannot be moved."""
    inside = [named(step.method) for step in compression.inside_encoder] + [named(step.method) for step in compression.inside_decoder]
    for name in inside:
        raise PluginError(f"{name} works inside encoder or decoder, and a stream is compressed between them; choose another")
    if compression.proportional:
        raise PluginError("the memory of a stream does not keep what tokens weigh; leave out proportional")
    if compression.asks:
        raise PluginError("a method that wants to know the question cannot compress a stream, which is read before one is asked")
    config = vlm.decoder.config
    grown = isinstance(config.rope_scaling, Dynamic | LongRope)
    if grown or config.levels or isinstance(config.attention, Latent):
        raise ModelError(f"{vlm.name}: its keys cannot be moved to other positions, so that an endless stream would leave its context")


def check_memory(vlm: VLM, memory: PolicyMemory) -> None:
    """Raises BudgetError for more than the model's context, ModelError for a policy that leaves gaps where they cannot close."""
    if isinstance(memory.amount, int) and memory.amount > vlm.context:
        raise BudgetError(f"{memory.name}:{memory.amount} holds more than {vlm.name}, whose context is {vlm.context}; hold less")
    if vlm.decoder.config.rope_sections.counts and not isinstance(memory.policy, Gapless):
        told = f"{vlm.name} stands on several axes, on which the gaps that {memory.name} leaves cannot close"
        raise ModelError(f'{told}; choose window or streaming ("window:{memory.amount}")')
