"""The tab of pictures: ask about one, see what a method leaves of it, and what that saves beside the answer from every token."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from mmsdk import plugins
from mmsdk.answer import Sight
from mmsdk.apps.demo import SHIPPED
from mmsdk.apps.explain import panels
from mmsdk.apps.web import markup
from mmsdk.apps.web.answered import Card, unasked
from mmsdk.apps.web.events import answering, streaming
from mmsdk.apps.web.looking import LONGEST, Choice, Looker, Said, Upload, checked_tokens
from mmsdk.apps.web.models import WEIGHTS, Models
from mmsdk.compress import METHODS, compression
from mmsdk.errors import InputError
from mmsdk.kv.memory import KINDS
from mmsdk.tokencomp.audit import dropped
from mmsdk.vision.intake import Limits
from mmsdk.vision.types import Image

__all__ = ["tab"]

SAMPLE = SHIPPED / "scene.png"
QUESTION = "Describe the picture."
SIDE = 720  # pixels of the drawn picture's longer side
GLOW = 0.0
KEPT = {
    "dense": "as they are",
    "paged": "in blocks, shared",
    "int8": "in 8 bits",
    "int4": "in 4 bits",
    "int2": "in 2 bits",
    "fp8": "in 8 bits, float",
    "turbo4": "turned, in 4 bits",
    "turbo2": "turned, in 2 bits",
}
Outputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ImageTab:
    """What happens in the tab. Gradio gives the values of its components in the order in which they are declared in `tab`."""

    models: Models
    limits: Limits

    def look(self, file: Any, question: str, method: str, share: int | float, kv: str, weights: str, looker: Looker) -> Outputs:
        """What the method keeps of the picture, drawn; nothing where the model is not there yet, which only a question waits for."""
        choice = Choice(method, share, kv, weights)
        if file is None or not self.models.ready(weights):
            return gr.skip(), looker
        picture = looker.show(Upload.of(file, "picture"), self.limits)
        return _figure(picture, looker.look(self.models, question, choice)), looker

    def take(self, *given: Any) -> Iterator[Outputs]:
        """What `look` says of a picture that was just brought; one that cannot be read leaves the page, and what stood there goes with it.

        Outputs: file, figure, two cards, status, looker.
        """
        file, looker = given[0], given[-1]
        try:
            # before the model is asked for: a picture that cannot be read is said to be one while it loads, too
            looker.show(Upload.of(file, "picture"), self.limits)
        except InputError:
            looker.stops += 1
            method, share = given[2:4]
            yield None, _blank(), *unasked(method, share), markup.status(), looker
            raise
        figure, _ = self.look(*given)
        yield gr.skip(), figure, gr.skip(), gr.skip(), gr.skip(), looker

    def first(self, file: Any, question: str, method: str, share: int | float, kv: str, weights: str, looker: Looker) -> Iterator[Outputs]:
        """When the page opens: wait for the model, and say so, then look at the picture that is there."""
        yield from ((gr.skip(), told, looker) for told in self._loading(weights))
        figure, looker = self.look(file, question, method, share, kv, weights, looker)
        yield figure, markup.status(), looker

    def ask(
        self,
        file: Any,
        question: str,
        method: str,
        share: int | float,
        kv: str,
        weights: str,
        looker: Looker,
        both: bool,
        tokens: int | float,
    ) -> Iterator[Outputs]:
        """Answer, streamed; then, if asked for, once more with every token. Outputs: figure, two cards, status, looker."""
        began, begun = looker.stops, time.perf_counter()
        choice, longest = Choice(method, share, kv, weights), checked_tokens(tokens)
        compression(choice.spec)
        picture = looker.show(Upload.of(file, "picture"), self.limits)
        for told in self._loading(weights):
            if looker.stops != began:
                yield gr.skip(), gr.skip(), gr.skip(), markup.status("stopped"), looker
                return
            yield gr.skip(), gr.skip(), gr.skip(), told, looker
        chosen, full = Card(self.models, choice), Card(self.models, choice.full)
        said = Said("")
        yield gr.skip(), chosen.writing(said), full.waiting(both), markup.status("reading the picture", busy=True), looker
        for said in looker.ask(self.models, picture, question, choice, longest, began):
            yield gr.skip(), chosen.writing(said), gr.skip(), markup.status("answering", busy=True), looker
        first = said
        if first.answer is None:
            yield gr.skip(), chosen.unfinished(first), full.waiting(False), markup.status("stopped"), looker
            return
        figure = _figure(picture, first.answer.sights[0])
        yield figure, chosen.done(first, first), gr.skip(), markup.status("answering once more, with every token", busy=both), looker
        for said in looker.ask(self.models, picture, question, choice.full, longest, began) if both else ():
            yield gr.skip(), gr.skip(), full.writing(said), gr.skip(), looker
        if said.answer is None:
            yield gr.skip(), gr.skip(), full.unfinished(said), markup.status("stopped"), looker
            return
        done = markup.status(f"done in {time.perf_counter() - begun:.1f} s")
        cards = (chosen.done(first, said), full.done(said, first)) if both else (gr.skip(), full.waiting(False))
        yield gr.skip(), *cards, done, looker

    def _loading(self, weights: str) -> Iterator[str]:
        """Words for as long as the model loads. Raises what that raises."""
        named = f"{self.models.name}, {self.models.label(weights)}"
        for seconds in self.models.waited(weights):
            yield markup.status(f"loading {named}: {seconds:.1f} s", busy=True)
        self.models.begin(weights).result()


def tab(page: gr.Blocks, models: Models, limits: Limits) -> None:
    """Draw the tab and say what happens in it, and when the page opens."""
    here = ImageTab(models, limits)
    looker = gr.State(Looker())
    with gr.Row(elem_classes="mm-split"):
        with gr.Column(scale=4, min_width=300, elem_classes="mm-left"):
            file = gr.Image(
                value=str(SAMPLE), type="filepath", sources=["upload"], label="Picture", height=230, buttons=[],
                elem_id="picture", show_label=False, placeholder="Drop a picture here\nor click to choose one",
            )  # fmt: skip
            question = gr.Textbox(QUESTION, label="Question", lines=2, max_lines=4, elem_id="question")
            with gr.Row(elem_classes="mm-buttons"):
                ask = gr.Button("Ask", variant="primary", elem_id="ask")
                stop = gr.Button("Stop", elem_id="stop")
            note = gr.HTML(markup.status(), elem_id="status", elem_classes="mm-out")
            method = gr.Dropdown(_methods(), value="simplecluster", label="Method", elem_id="method")
            share = gr.Slider(2, 100, 25, step=1, label="Tokens kept, in percent", elem_id="share", buttons=[])
            kv = gr.Dropdown(_kinds(models.kv), value=models.kv, label="Keys and values", elem_id="kv")
            tokens = gr.Slider(1, LONGEST, 48, step=1, label="Longest answer, in tokens", buttons=[], elem_id="longest")
            weights = gr.Radio([(models.label(kind), kind) for kind in WEIGHTS], value=models.first, label="Weights", elem_id="weights")
            both = gr.Checkbox(True, label="Answer once more with every token, to compare", elem_id="both")
        with gr.Column(scale=7, min_width=320, elem_classes="mm-right"):
            figure = gr.HTML(_blank(), elem_id="figure", elem_classes="mm-out")
            with gr.Row(elem_classes="mm-cards"):
                chosen, full = (
                    gr.HTML(text, elem_id=name, elem_classes="mm-out")
                    for name, text in zip(("chosen", "full"), unasked("simplecluster", 25), strict=True)
                )
    given = [file, question, method, share, kv, weights, looker]
    quiet = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    failed = (gr.skip(), gr.skip(), gr.skip(), markup.status(), gr.skip())
    gr.on(
        [ask.click, question.submit], streaming(here.ask, failed), [*given, both, tokens], [figure, chosen, full, note, looker],
        concurrency_limit=8, concurrency_id="image", **quiet,
    )  # fmt: skip
    stop.click(_stop, looker, note, queue=False, show_progress="hidden", api_visibility="private")
    gr.on(
        [share.release, method.change, weights.change], answering(here.look), given, [figure, looker],
        concurrency_limit=8, trigger_mode="always_last", **quiet,
    )  # fmt: skip
    file.upload(
        streaming(here.take, (gr.skip(),) * 6), given, [file, figure, chosen, full, note, looker],
        concurrency_limit=8, trigger_mode="always_last", **quiet,
    )  # fmt: skip
    page.load(streaming(here.first, (gr.skip(), markup.status(), gr.skip())), given, [figure, note, looker], concurrency_limit=8, **quiet)


def _stop(looker: Looker) -> str:
    looker.stops += 1
    return markup.status("stopped")


def _methods() -> list[tuple[str, str]]:
    """Every method by name, with what it is."""
    return [(name, name) for name in plugins.available(METHODS) if name != "identity"]


def _kinds(first: str) -> list[tuple[str, str]]:
    """How keys and values may be kept, each with what it is; the one that the page begins with may be a policy with its amount."""
    kinds = [(f"{kind}: {KEPT[kind]}", kind) for kind in KINDS]
    return kinds if first in KINDS else [(first, first), *kinds]


def _blank() -> str:
    return (
        '<figure class="mm-figure mm-wait"><div></div><figcaption>What the model keeps of the picture appears here.</figcaption></figure>'
    )


def _figure(picture: Image, sight: Sight) -> str:
    (drawn,) = panels(picture, sight, SIDE, GLOW)
    source, kept = len(sight.positions), int(sight.audit.assignment.max()) + 1
    lost = int(dropped(sight.audit).sum())
    merged = source - lost - kept
    told = [f"<b>{kept}</b> of {source} tokens", f"{merged} merged into them" if merged else "", f"{lost} dropped, dark" if lost else ""]
    caption = " · ".join(part for part in told if part)
    alt = f"{kept} of {source} patches kept by {sight.audit.method}"
    return f'<figure class="mm-figure">{markup.picture(drawn, alt)}<figcaption>{caption}</figcaption></figure>'
