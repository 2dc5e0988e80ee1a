"""One moment of the demo's robot as HTML: where it is, its camera, its plan, its latency, and what the loop counted so far."""

import html
from collections.abc import Sequence

import PIL.Image

from mmsdk.apps.web import markup
from mmsdk.apps.web.belt import BeltScene
from mmsdk.apps.web.driving import DEADLINE, FUTURE, PAST, Plotted, View

__all__ = ["blank", "drawn"]

WIDE, HIGH = 1000, 300  # of the drawn belt, whose metres are thousands here
COLOURS = ("mm-red", "mm-blue")


def blank() -> str:
    """Before anything runs."""
    return '<figure class="mm-figure mm-wait"><div></div><figcaption>The robot appears here when it runs.</figcaption></figure>'


def drawn(view: View) -> str:
    """All of it."""
    report = view.report
    numbers = markup.facts(
        [
            markup.Fact(view.success, str(sum(view.ended)), f"of {len(view.ended)}"),
            markup.Fact("late answers", str(report.deadline_misses), f"of {report.requests}"),
            markup.Fact("ticks held", f"{100 * report.held_rate:.0f}", "%"),
            markup.Fact("changed by the gate", f"{100 * report.changed_rate:.0f}", "%"),
        ]
    )
    if isinstance(view.scene, BeltScene):
        return f"{_over_belt(view, view.scene)}{_plan(view)}{numbers}"
    picture = markup.picture(PIL.Image.fromarray(view.scene.pixels), "the scene", 82)
    told = f"simulated by MuJoCo; step {view.scene.step}"
    return (
        f'<div class="mm-two mm-arm"><div><figure class="mm-figure">{picture}'
        f"<figcaption>{_ending(view.outcome)}{told}</figcaption></figure>{_seen(view)}</div>"
        f"<div>{_latency(view)}{_plan(view)}</div></div>{numbers}"
    )


def _seen(view: View) -> str:
    """What the robot's own cameras show."""
    pictures = "".join(markup.picture(PIL.Image.fromarray(pixels), "camera") for pixels in view.cameras)
    size = f"{view.cameras[0].shape[1]} by {view.cameras[0].shape[0]}"
    told = f"what the arm's two cameras give, {size} pixels: {html.escape(view.instruction)}"
    return f'<figure class="mm-figure mm-eyes"><div>{pictures}</div><figcaption>{told}</figcaption></figure>'


def _over_belt(view: View, scene: BeltScene) -> str:
    (camera,) = view.cameras
    return (
        f'<figure class="mm-figure mm-belt">{_belt(scene, view.outcome)}'
        f"<figcaption>{_ending(view.outcome)}the belt from above; <i></i> where the camera, 0.32 s late, still shows things"
        "</figcaption></figure>"
        f'<div class="mm-two"><figure class="mm-figure mm-camera">{markup.picture(PIL.Image.fromarray(camera), "camera")}'
        f"<figcaption>what the camera gives: {camera.shape[1]} by {camera.shape[0]} pixels</figcaption></figure>"
        f"{_latency(view)}</div>"
    )


def _belt(scene: BeltScene, outcome: str) -> str:
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
    caption = f"sent for {PAST / view.rate:.1f} s, and planned for up to {FUTURE / view.rate:.1f} s: the action chunk"
    return f'<figure class="mm-figure mm-plan">{"".join(map(_row, view.plots))}<figcaption>{caption}</figcaption></figure>'


def _row(plot: Plotted) -> str:
    before = [(PAST - len(plot.sent) + place, float(value)) for place, value in enumerate(plot.sent)]
    after = [(PAST - 1, float(value)) for value in plot.sent[-1:]] + [
        (PAST + place, float(value)) for place, value in enumerate(plot.planned)
    ]
    now, sent, planned = f"M{PAST - 1} 0V24", _line(before, plot), _line(after, plot)
    name = html.escape(plot.name)
    return (
        f'<div><span>{name}</span><svg viewBox="0 0 {PAST + FUTURE} 24" preserveAspectRatio="none" role="img" aria-label="{name}">'
        f'<path class="mm-now" d="{now}"/><path class="mm-sent" d="{sent}"/><path class="mm-next" d="{planned}"/></svg></div>'
    )


def _line(points: Sequence[tuple[int, float]], plot: Plotted) -> str:
    drawn = [f"{x:g} {22 - 20 * (value - plot.low) / (plot.high - plot.low):.1f}" for x, value in points]
    return f"M{'L'.join(drawn)}" if drawn else ""
