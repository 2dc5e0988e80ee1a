"""The tab of made clips: a text, how it is made, the steps as they are done, and the clip with what it cost."""

import base64
import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmsdk import plugins
from mmsdk.apps.web import markup
from mmsdk.apps.web.events import streaming
from mmsdk.apps.web.filming import Films, Order
from mmsdk.diffusion.adapter import METHODS
from mmsdk.diffusion.caching import CACHES
from mmsdk.diffusion.clip import Clip
from mmsdk.errors import InputError
from mmsdk.vision.films import animated

__all__ = ["tab"]

TEXT = "a red ball moves left behind a blue box"
MOST, FARTHEST = 60, 8  # steps, and how far guidance goes
STOPPED = "stopped"
Outputs = tuple[Any, ...]


@dataclass(slots=True)
class Visitor:
    """How often what is being made for one was ended by another event."""

    stops: int = 0


@dataclass(frozen=True, slots=True)
class MakingTab:
    """What happens in the tab."""

    films: Films

    def make(
        self, text: str, seed: Any, steps: Any, guidance: Any, attention: str, cache: str, two_stage: bool, visitor: Visitor
    ) -> Iterator[Outputs]:
        """The clip of a text. Outputs: figure, status, visitor."""
        visitor.stops += 1
        began = visitor.stops
        numbers = _whole(seed, 0, 2**31, "seed"), _whole(steps, 1, MOST, "steps"), _real(guidance, 1, FARTHEST, "guidance")
        order = Order(text, *numbers, attention, cache, bool(two_stage))
        yield gr.skip(), markup.status(f"loading {self.films.name}, or waiting for a clip before this one", busy=True), visitor
        for progress in self.films.make(order, lambda: visitor.stops != began):
            if progress.clip is not None:
                yield _figure(progress.clip), markup.status(f"made in {progress.seconds:.1f} s"), visitor
                return
            if progress.step:
                told = f"step {progress.step} of {order.steps}, {progress.seconds:.1f} s"
                yield gr.skip(), markup.status(told, busy=True), visitor
        yield gr.skip(), markup.status(STOPPED), visitor


def tab(films: Films) -> None:
    """Draw the tab and say what happens in it."""
    here, visitor = MakingTab(films), gr.State(Visitor())
    attentions, caches = (["dense", *plugins.available(METHODS)], plugins.available(CACHES))
    with gr.Row(elem_classes="mm-split"):
        with gr.Column(scale=4, min_width=300, elem_classes="mm-left"):
            text = gr.Textbox(TEXT, label="What happens", lines=2, max_lines=4, elem_id="film-text")
            with gr.Row(elem_classes="mm-buttons"):
                make = gr.Button("Make", variant="primary", elem_id="film-make")
                stop = gr.Button("Cancel", elem_id="film-stop")
            note = gr.HTML(markup.status(), elem_id="film-status", elem_classes="mm-out")
            seed = gr.Slider(0, 999, 0, step=1, label="Seed", elem_id="film-seed", buttons=[])
            steps = gr.Slider(1, MOST, 20, step=1, label="Steps", elem_id="film-steps", buttons=[])
            guidance = gr.Slider(1, FARTHEST, 3, step=0.5, label="Guidance", elem_id="film-guidance", buttons=[])
            attention = gr.Dropdown(attentions, value="dense", label="Attention", allow_custom_value=True, elem_id="film-attention")
            cache = gr.Dropdown(caches, value="none", label="Step cache", allow_custom_value=True, elem_id="film-cache")
            two_stage = gr.Checkbox(False, label="First half of the steps at half the size", elem_id="film-two-stage")
        with gr.Column(scale=7, min_width=320, elem_classes="mm-right"):
            figure = gr.HTML(_blank(), elem_id="film", elem_classes="mm-out")
    quiet = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on(
        [make.click, text.submit], streaming(here.make, (gr.skip(), markup.status(), gr.skip())),
        [text, seed, steps, guidance, attention, cache, two_stage, visitor], [figure, note, visitor], concurrency_limit=8,
        # a clip that was cancelled may still be at its last step
        trigger_mode="multiple", **quiet,
    )  # fmt: skip
    stop.click(_stop, visitor, note, queue=False, show_progress="hidden", api_visibility="private")


def _stop(visitor: Visitor) -> str:
    visitor.stops += 1
    return markup.status(STOPPED)


def _whole(value: Any, least: int, most: int, name: str) -> int:
    return int(_real(value, least, most, name))


def _real(value: Any, least: int, most: int, name: str) -> float:
    if not isinstance(value, int | float) or not least <= value <= most:
        raise InputError(f"it is {value!r}, expected from {least} to {most}", item=name)
    return float(value)


def _blank() -> str:
    return '<figure class="mm-figure mm-wait"><div></div><figcaption>The clip appears here.</figcaption></figure>'


def _figure(clip: Clip) -> str:
    data, cost, times = base64.b64encode(animated(clip)).decode(), clip.cost, clip.timings
    skipped = sum(cost.skipped.values())
    facts = [
        markup.Fact("frames", markup.number(len(clip.frames)), f"{clip.size[1]} x {clip.size[0]}"),
        markup.Fact("passes", markup.number(cost.passes), f"{skipped} of them spared" if skipped else ""),
        markup.Fact("tokens", markup.number(cost.tokens), "in all passes"),
        markup.Fact("seed", str(clip.seed)),
    ]
    stages = {"text": times.text, "steps": times.denoise, "pixels": times.decode}
    bar = markup.bar([markup.Segment(name, ms, f"{markup.number(ms)} ms") for name, ms in stages.items()], times.total)
    image = f'<img class="mm-film" alt="{html.escape(clip.source)}" src="data:image/gif;base64,{data}">'
    return f'<figure class="mm-figure">{image}<figcaption>{html.escape(clip.source)}</figcaption></figure>{markup.facts(facts)}{bar}'
