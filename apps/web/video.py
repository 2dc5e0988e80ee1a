"""The tab of clips: frames go by, bars say what is held of each, and questions are answered about what was seen so far."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmsdk import plugins
from mmsdk.answer import Answer
from mmsdk.apps.demo import SHIPPED
from mmsdk.apps.web import markup
from mmsdk.apps.web.events import answering, streaming
from mmsdk.apps.web.looking import Upload, checked_tokens
from mmsdk.apps.web.models import WEIGHTS, Models
from mmsdk.apps.web.watching import Step, Watcher, clip, unseen
from mmsdk.compress import METHODS
from mmsdk.errors import InputError, PluginError
from mmsdk.vision.intake import Limits
from mmsdk.vision.types import Video
from mmsdk.watch import holding

__all__ = ["tab"]

SAMPLE = SHIPPED / "motion.mp4"
QUESTION = "What happens?"
MOST, TAKEN = 48, 16  # frames of a clip: at most, and at first
TOKENS = 48  # of an answer
STOPPED = "stopped; what was seen is held"
Outputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class VideoTab:
    """What happens in the tab."""

    models: Models
    limits: Limits

    def show(self, file: Any, frames: int | float) -> str:
        """The frames that would be taken of the clip."""
        return _timeline(unseen(self._taken(Upload.of(file, "clip"), frames)), 0) if file else _blank()

    def watch(
        self, file: Any, question: str, method: str, hold: int | float, frames: int | float, weights: str, watcher: Watcher
    ) -> Iterator[Outputs]:
        """Frames one after another, then the answer. Outputs: timeline, answer, status, watcher."""
        began = watcher.stops
        video = self._taken(Upload.of(file, "clip"), frames)
        for seconds in self.models.waited(weights):
            told = f"loading {self.models.name}, {self.models.label(weights)}: {seconds:.1f} s"
            if watcher.stops != began:
                break
            yield gr.skip(), gr.skip(), markup.status(told, busy=True), watcher
        if watcher.stops != began:
            yield gr.skip(), gr.skip(), markup.status("stopped"), watcher
            return
        for steps in watcher.see(self.models, video, method, int(hold), weights, began):
            told = f"{len(watcher.frames)} of {len(video.frames)} frames seen"
            yield _timeline(steps, int(hold)), gr.skip(), markup.status(told, busy=True), watcher
        if watcher.stops != began:
            yield gr.skip(), gr.skip(), markup.status(STOPPED), watcher
            return
        for outputs in self.ask(question, watcher):
            yield gr.skip(), *outputs

    def ask(self, question: str, watcher: Watcher) -> Iterator[Outputs]:
        """The answer about what was seen so far. Outputs: answer, status, watcher."""
        began = watcher.stops
        begun, tag, text, whole = time.perf_counter(), _tag(watcher), "", False
        for text, answer in watcher.ask(self.models, question, checked_tokens(TOKENS), began):
            whole = answer is not None
            if answer is None:
                yield markup.card(question, tag, text, writing=True, chosen=True), markup.status("answering", busy=True), watcher
            else:
                done = markup.status(f"answered in {time.perf_counter() - begun:.1f} s")
                yield markup.card(question, tag, text, _cost(answer), chosen=True), done, watcher
        if not whole:
            yield markup.card(question, "stopped", text, chosen=True), markup.status(STOPPED), watcher

    def _taken(self, upload: Upload, frames: int | float) -> Video:
        if not 2 <= frames <= MOST:
            raise InputError(f"{frames:g}, expected from 2 to {MOST}", item="frames")
        return clip(upload, int(frames), self.limits)


def tab(models: Models, limits: Limits) -> None:
    """Draw the tab and say what happens in it."""
    here = VideoTab(models, limits)
    watcher = gr.State(Watcher())
    with gr.Row(elem_classes="mm-split"):
        with gr.Column(scale=4, min_width=300, elem_classes="mm-left"):
            file = gr.File(value=str(SAMPLE), label="Clip", show_label=False, elem_id="clip", height=110, buttons=[])
            question = gr.Textbox(QUESTION, label="Question", lines=2, max_lines=4, elem_id="clip-question")
            with gr.Row(elem_classes="mm-buttons"):
                watch = gr.Button("Watch", variant="primary", elem_id="watch")
                ask = gr.Button("Ask now", elem_id="ask-now")
                stop = gr.Button("Stop", elem_id="clip-stop")
            note = gr.HTML(markup.status(), elem_id="clip-status", elem_classes="mm-out")
            method = gr.Dropdown(_holding(), value="simplecluster", label="Method", elem_id="clip-method")
            hold = gr.Slider(16, 1024, 256, step=16, label="Tokens held, at most", elem_id="hold", buttons=[])
            frames = gr.Slider(2, MOST, TAKEN, step=2, label="Frames taken of the clip", elem_id="frames", buttons=[])
            weights = gr.Radio(
                [(models.label(kind), kind) for kind in WEIGHTS], value=models.first, label="Weights", elem_id="clip-weights"
            )
        with gr.Column(scale=7, min_width=320, elem_classes="mm-right"):
            timeline = gr.HTML(here.show({"path": str(SAMPLE)}, TAKEN), elem_id="timeline", elem_classes="mm-out")
            answer = gr.HTML(markup.card(QUESTION, "no frame seen yet", ""), elem_id="clip-answer", elem_classes="mm-out")
    quiet = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private", "concurrency_limit": 8}
    failed = (gr.skip(), gr.skip(), markup.status(), gr.skip())
    watch.click(
        streaming(here.watch, failed), [file, question, method, hold, frames, weights, watcher], [timeline, answer, note, watcher], **quiet
    )
    gr.on([file.upload, file.clear, frames.release], answering(here.show), [file, frames], timeline, trigger_mode="always_last", **quiet)
    ask.click(streaming(here.ask, failed[1:]), [question, watcher], [answer, note, watcher], **quiet)
    stop.click(_stop, watcher, note, queue=False, show_progress="hidden", api_visibility="private")


def _holding() -> list[str]:
    """The methods that can hold frames until a question comes."""
    return [name for name in plugins.available(METHODS) if name != "identity" and _can_hold(name)]


def _can_hold(name: str) -> bool:
    try:
        return not holding(name).asks
    except PluginError:
        return False


def _stop(watcher: Watcher) -> str:
    watcher.stops += 1
    return markup.status(STOPPED)


def _blank() -> str:
    return '<figure class="mm-figure mm-wait"><div></div><figcaption>The frames of a clip appear here.</figcaption></figure>'


def _timeline(steps: Sequence[Step], hold: int) -> str:
    """One column a step: its frame, and a bar as high as the share of its tokens that is held."""
    columns = [
        f"<li>{markup.picture(step.frame, f'at {step.seconds:.1f} s', 80)}"
        f'<span class="mm-level"><i style="height:{100 * min(1.0, step.held / max(1, step.of)):.1f}%"></i></span>'
        f"<b>{step.held if step.of else '-'}</b><small>{step.seconds:.1f} s</small></li>"
        for step in steps
    ]
    held, full = sum(step.held for step in steps), sum(step.of for step in steps)
    told = f"<b>{held}</b> of {full} tokens held, at most {hold}; bars are the share of each frame's {steps[0].of}"
    caption = told if full else f"{len(steps)} frames, not yet seen"
    return f'<figure class="mm-figure"><ol class="mm-timeline">{"".join(columns)}</ol><figcaption>{caption}</figcaption></figure>'


def _tag(watcher: Watcher) -> str:
    return f"after {len(watcher.frames)} frames, {watcher.seconds[-1]:.1f} s" if watcher.seconds else "no frame seen yet"


def _cost(answer: Answer) -> str:
    tokens, times = answer.tokens, answer.timings
    return markup.facts(
        [
            markup.Fact("visual tokens", markup.number(tokens.kept)),
            markup.Fact("prompt", markup.number(tokens.prompt), "tokens"),
            markup.Fact("prefill", markup.number(times.prefill), "ms"),
            markup.Fact("decode", markup.number(times.decode), f"ms · {tokens.generated} tokens said"),
        ]
    )
