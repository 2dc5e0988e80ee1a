"""What happens at a click, as Gradio wants it: typed errors become messages on the page, and streams are told from plain functions.

Gradio streams only what is a generator function itself, and shows a traceback's last line, or nothing, for any error but its own.
"""

import html
from collections.abc import Callable, Iterator
from typing import Any, cast

import gradio as gr

from mmsdk.errors import BudgetError, InputError, MmsdkError, ModelError, PluginError, SafetyError, WeightsError

__all__ = ["answering", "streaming", "told"]

Outputs = tuple[Any, ...]
TITLES: tuple[tuple[type[MmsdkError], str], ...] = (
    (BudgetError, "That budget does not fit"),
    (InputError, "This cannot be used"),
    (PluginError, "There is no such method"),
    (WeightsError, "The weights cannot be had"),
    (SafetyError, "Refused, to be safe"),
    (ModelError, "The model cannot do this"),
)


def answering(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function for an event, whose typed errors are shown."""

    def answer(*given: Any) -> Any:
        try:
            return fn(*given)
        except MmsdkError as error:
            raise told(error) from error

    return answer


def streaming(fn: Callable[..., Iterator[Outputs]], failed: Outputs) -> Callable[..., Iterator[Outputs]]:
    """A generator for an event, whose typed errors are shown; the outputs are then set to `failed`, so that nothing seems to go on."""
    return cast(Callable[..., Iterator[Outputs]], lambda *given: (yield from _streamed(fn(*given), failed)))


def told(error: MmsdkError) -> gr.Error:
    """The message that the page shows. Letters of the user's own are no markup. (Of a stream's errors Gradio shows no title.)"""
    title = next((title for kind, title in TITLES if isinstance(error, kind)), "Something is wrong")
    return gr.Error(f"<b>{title}.</b> {html.escape(str(error))}", duration=12, print_exception=False)


def _streamed(pieces: Iterator[Outputs], failed: Outputs) -> Iterator[Outputs]:
    try:
        yield from pieces
    except MmsdkError as error:
        yield failed
        raise told(error) from error
