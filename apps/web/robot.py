"""The tab of robots: a simulated task runs live under the real control loop, with its camera, its plan, its latency, and a stop button."""

import html
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr
import numpy as np
import PIL.Image

from mmsdk.apps.web import markup
from mmsdk.apps.web.driving import DEADLINE, Run, Scene, View
from mmsdk.apps.web.events import answering, streaming
from mmsdk.errors import InputError
from mmsdk.vla.envs.belt import RATE

__all__ = ["tab"]

TASKS = (("Pick what comes by", "belt"), ("Remember the lamp's colour", "cue"))
EVERY = 0.1  # seconds between two looks
SLOWEST = 800  # ms of thinking
ROWS = (("along", -1.0), ("across", -1.0), ("fingers", 0.0))
PAST, FUTURE = 50, 24  # ticks of the plot
WIDE, HIGH = 1000, 300  # of the drawn belt, whose metres are thousands here
COLOURS = ("mm-red", "mm-blue")
ABOUT = (
    "The policy is a <b>script that knows the simulation</b>; no policy that sees is trained for this task yet. Real is what is around "
    "it: the control loop at 25 Hz, chunks that arrive late, the gate that has the last word on every command, the emergency stop. "
    "The simulation is plain kinematics, no physics engine."
)
Outputs = tuple[Any, ...]
NOBODY: tuple[Run, ...] = ()


def tab() -> None:
    """Draw the tab and say what happens in it."""
    run = gr.State(NOBODY)
    with gr.Row(elem_classes="mm-split"):
        with gr.Column(scale=4, min_width=300, elem_classes="mm-left"):
            task = gr.Radio(list(TASKS), value="belt", label="Task", elem_id="task")
            thinking = gr.Slider(0, SLOWEST, 60, step=10, label="The policy thinks for, in ms", elem_id="thinking", buttons=[])
            with gr.Row(elem_classes="mm-buttons"):
                begin = gr.Button("Run", variant="primary", elem_id="run")
                stop = gr.Button("Stop", variant="stop", elem_id="robot-stop")
            note = gr.HTML(markup.status(), elem_id="robot-status", elem_classes="mm-out")
            gr.HTML(f'<p class="mm-about">{ABOUT}</p>')
        with gr.Column(scale=7, min_width=320, elem_classes="mm-right"):
            view = gr.HTML(_blank(), elem_id="robot-view", elem_classes="mm-out")
    quiet = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    failed = (gr.skip(), markup.status(), NOBODY)
    begin.click(streaming(_driven, failed), [task, thinking, run], [view, note, run], concurrency_limit=8, **quiet)
    stop.click(answering(_stopped), run, note, queue=False, **quiet)


def _driven(task: str, thinking: int | float, before: tuple[Run, ...]) -> Iterator[Outputs]:
    """A run from its first tick to its last. Outputs: view, status, run. However the page goes away, the robot comes to rest."""
    if task not in dict(TASKS).values():
        raise InputError(f"there is no {task!r}; choose one of {', '.join(name for _, name in TASKS)}", item="task")
    if not 0 <= thinking <= SLOWEST:
        raise InputError(f"{thinking:g} ms, expected from 0 to {SLOWEST}", item="thinking")
    for other in before:
        other.end()
    run = Run(task == "cue", thinking / 1000, seed=int(time.time()))
    run.start()
    try:
        yield gr.skip(), markup.status("warming up the policy", busy=True), (run,)
        while run.running:
            time.sleep(EVERY)
            view = run.view
            if view is not None:
                yield _drawn(view), _told(view), (run,)
        view = run.view
        if view is not None:
            yield _drawn(view), markup.status(_ended(view)), NOBODY
    finally:
        run.end()


def _stopped(runs: tuple[Run, ...]) -> str:
    for run in runs:
        run.trip("stop button")
    return markup.status("stopping" if runs else "nothing runs", busy=bool(runs))


def _told(view: View) -> str:
    if view.stopped:
        return markup.status(f"emergency stop: {view.stopped}; the hand is held", busy=True)
    return markup.status(f"tick {view.tick} · {view.instruction}" + (f" · held: {view.held}" if view.held else ""), busy=True)


def _ended(view: View) -> str:
    return f"stopped by the {view.stopped}; the hand is at rest" if view.stopped else "at the end; the hand is at rest"


def _blank() -> str:
    return '<figure class="mm-figure mm-wait"><div></div><figcaption>The belt appears here when the robot runs.</figcaption></figure>'


def _drawn(view: View) -> str:
    picked = sum(outcome == "picked" for outcome in view.ended)
    report = view.report
    numbers = markup.facts(
        [
            markup.Fact("picked", str(picked), f"of {len(view.ended)}"),
            markup.Fact("late answers", str(report.deadline_misses), f"of {report.requests}"),
            markup.Fact("ticks held", f"{100 * report.held_rate:.0f}", "%"),
            markup.Fact("changed by the gate", f"{100 * report.changed_rate:.0f}", "%"),
        ]
    )
    return (
        f'<figure class="mm-figure mm-belt">{_belt(view.scene, view.outcome)}'
        f"<figcaption>{_ending(view.outcome)}the belt from above; <i></i> where the camera, 0.32 s late, still shows things"
        "</figcaption></figure>"
        f'<div class="mm-two"><figure class="mm-figure mm-camera">{markup.picture(PIL.Image.fromarray(view.camera), "camera")}'
        f"<figcaption>what the camera gives: {view.camera.shape[1]} by {view.camera.shape[0]} pixels</figcaption></figure>"
        f"{_latency(view)}</div>{_plan(view)}{numbers}"
    )


def _belt(scene: Scene, outcome: str) -> str:
    """The belt, its things, their late images, and the hand; a metre is a thousand wide, and twice as much across."""
    things = "".join(
        _thing(*(scene.hand if outcome == "picked" and place == scene.wanted else (x, lane)), late, lane, COLOURS[place])
        for place, ((x, lane, there), late) in enumerate(zip(scene.things, scene.seen, strict=True))
        if there
    )
    hand = _hand(_x(scene.hand[0]), _y(scene.hand[1]), 34 - 14 * min(1.0, scene.closed), scene.go)
    way = 9 if scene.speed > 0 else -9
    arrows = "".join(f'<path d="M{at} 141 l{way} 9 l{-way} 9"/>' for at in range(40, WIDE, 80))
    label = f"belt moving {'right' if scene.speed > 0 else 'left'}"
    return (
        f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{label}"><rect class="mm-band" y="60" width="{WIDE}" height="180"/>'
        f'<g class="mm-arrows">{arrows}</g>{things}{hand}</svg>'
    )


def _thing(x: float, y: float, late: float, lane: float, kind: str) -> str:
    """One thing where it is, held or not, and a dashed ring where the camera still shows it."""
    rings = ((late, lane, "mm-late"), (x, y, kind))
    return "".join(f'<circle class="{drawn}" cx="{_x(at)}" cy="{_y(across)}" r="24"/>' for at, across, drawn in rings)


def _ending(outcome: str) -> str:
    return f"<b>{html.escape(outcome)}</b> · " if outcome else ""


def _hand(x: float, y: float, half: float, go: bool) -> str:
    """Two fingers, `half` to either side, and what holds them."""
    fingers = "".join(f'<rect x="{x + side * half - 5:.1f}" y="{y - 34:.1f}" width="10" height="68" rx="4"/>' for side in (-1, 1))
    palm = f'<rect x="{x - half:.1f}" y="{y - 44:.1f}" width="{2 * half:.1f}" height="12" rx="5"/>'
    return f'<g class="mm-hand{" mm-go" * go}">{fingers}{palm}</g>'


def _x(metres: float) -> float:
    return round(500 + 1000 * metres, 1)


def _y(metres: float) -> float:
    return round(150 - 1000 * metres, 1)


def _latency(view: View) -> str:
    """The last answer's time on a scale that ends at the deadline, with the median and the 95th percentile."""
    spread, last = view.report.latency_ms, view.latencies[-1] if view.latencies else 0.0
    whole = 1000 * DEADLINE
    marks = "".join(f'<b style="left:{min(100.0, 100 * value / whole):.1f}%"></b>' for value in (spread.p50, spread.p95) if spread.count)
    tone = " mm-slow" if last > 0.8 * whole else ""
    length = f"{min(100.0, 100 * last / whole):.1f}%"
    return (
        f'<div class="mm-latency"><h4>Latency</h4><div class="mm-track{tone}"><i style="width:{length}"></i>{marks}</div>'
        f"<p><b>{last:.0f} ms</b> · median {spread.p50:.0f} · 95 % {spread.p95:.0f} · deadline {whole:.0f}</p></div>"
    )


def _plan(view: View) -> str:
    """What was sent, and behind the line what is planned: one row a number of the action."""
    rows = [_row(name, view.sent[:, column], view.planned[:, column], low) for column, (name, low) in enumerate(ROWS)]
    period = 1000 // RATE
    caption = f"sent for {PAST * period / 1000:.0f} s, and planned for up to {FUTURE * period / 1000:.1f} s: the action chunk"
    return f'<figure class="mm-figure mm-plan">{"".join(rows)}<figcaption>{caption}</figcaption></figure>'


def _row(name: str, sent: np.ndarray, planned: np.ndarray, low: float) -> str:
    before = [(PAST - len(sent) + place, value) for place, value in enumerate(sent)]
    after = [(PAST - 1, sent[-1])] * (len(sent) > 0) + [(PAST + place, value) for place, value in enumerate(planned)]
    now, sent_, next_ = f"M{PAST - 1} 0V24", _line(before, low), _line(after, low)
    return (
        f'<div><span>{name}</span><svg viewBox="0 0 {PAST + FUTURE} 24" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f'<path class="mm-now" d="{now}"/><path class="mm-sent" d="{sent_}"/><path class="mm-next" d="{next_}"/></svg></div>'
    )


def _line(points: Sequence[tuple[int, float]], low: float) -> str:
    drawn = [f"{x:g} {22 - 20 * (float(value) - low) / (1 - low):.1f}" for x, value in points]
    return f"M{'L'.join(drawn)}" if drawn else ""
