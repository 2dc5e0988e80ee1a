"""The errors that mmsdk raises at its boundaries, as one small tree.

Every message names the offending item, the value that was seen, what was expected and, where there is one, the fix.
This module imports nothing, so that every package of the SDK may stand on it.
"""

__all__ = ["BudgetError", "InputError", "MmsdkError", "ModelError", "PluginError", "SafetyError", "WeightsError", "WireError"]


class MmsdkError(Exception):
    """Root of the tree: catching it catches everything that mmsdk raises on purpose."""


class InputError(MmsdkError, ValueError):
    """An input (image, clip, prompt, observation) cannot be used.

    `item` names the input as the caller knows it (a path, "bytes", "frame 3"); `index` is its place in the batch, counted from 0. The
    message counts as people do, and says both: "item 2 (index 1, cat.jpg): ...".
    """

    def __init__(self, message: str, *, item: str = "", index: int | None = None) -> None:
        where = item if index is None else f"item {index + 1} (index {index}{', ' if item else ''}{item})"
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.item = item
        self.index = index

    def at(self, index: int | None) -> "InputError":
        """The same error, naming its place in a batch (counted from 0), or none."""
        return type(self)(self.message, item=self.item, index=index)

    def within(self, frame: int, source: object) -> "InputError":
        """The same error, of a frame: "frame 3", with its own name where its source is written down: "frame 3 (cat.jpg)"."""
        named = f" ({self.item})" if self.item and (isinstance(source, str) or hasattr(source, "__fspath__")) else ""
        return type(self)(self.message, item=f"frame {frame}{named}")


class BudgetError(InputError):
    """A token budget is zero, negative, not a number, or larger than the number of tokens of an input."""


class ModelError(MmsdkError):
    """A checkpoint or its configuration cannot be run: unknown architecture, missing or unexpected tensors."""


class WeightsError(MmsdkError):
    """A weight file cannot be fetched, verified or read."""


class PluginError(MmsdkError, ValueError):
    """A plugin's name or one of its knobs is unknown; the message says what is near."""


class SafetyError(MmsdkError):
    """An action was refused before it could reach the robot."""


class WireError(MmsdkError):
    """The other end of a connection cannot be reached, does not answer in time, or is not what it should be."""
