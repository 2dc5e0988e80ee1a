"""The tab of robots: a simulated task runs live under the real control loop, with its camera, its plan, its latency, and a stop button."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import Any

import gradio as gr

from mmsdk.apps.robots.episodes import HELD_OUT
from mmsdk.apps.web import markup
from mmsdk.apps.web.arm import Arm, Expert
from mmsdk.apps.web.belt import BeltHand, Script
from mmsdk.apps.web.driving import Pondering, Run, View
from mmsdk.apps.web.events import answering, streaming
from mmsdk.apps.web.scenes import blank, drawn
from mmsdk.errors import InputError
from mmsdk.vla.default import default_policy
from mmsdk.vla.envs.metaworld import TASKS, missing
from mmsdk.vla.types import Policy

__all__ = ["RobotTab", "tab", "watched"]

BELT = {"belt": "pick what comes by", "cue": "remember the lamp's colour"}
FIRST = "drawer-open-v3"
EVERY = 0.1  # seconds between two looks
SLOWEST = 800  # ms of thinking
TOGETHER = 2  # simulations at one time: each is a process with a renderer of its own
LOOP = (
    "Around it is what a real robot has: the control loop at its rate, chunks of actions that arrive late, the gate that has the last word "
    "on every command, the emergency stop."
)
ARM = "<b>MuJoCo</b> simulates a Sawyer arm in a task of Meta-World, at a quarter of real speed. "
DRIVERS = {"learned": "the policy that ships", "script": "a script that knows the simulation"}
TOLD = {
    "learned": "The policy is <b>the one that ships</b>: it sees what the arm's two cameras show, is told in words what to do, and was "
    "trained on Meta-World's ten tasks MT10. ",
    "script": "The policy is <b>Meta-World's own script</b>, which reads the simulation's state and no picture. ",
}
HAND = (
    "A hand over a belt, seen 0.32 s late, in plain kinematics without a physics engine. The policy is a <b>script that knows the "
    "simulation</b>: no policy that sees is trained for this task yet. "
)
Outputs = tuple[Any, ...]
NOBODY: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class RobotTab:
    """What happens in the tab. `lacks` says what the simulations in MuJoCo lack here, "" for nothing."""

    lacks: str
    places: BoundedSemaphore = field(default_factory=lambda: BoundedSemaphore(TOGETHER))

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """What can be run here, with its name on the page."""
        arms = [] if self.lacks else [(f"Arm · {told[0]}", task) for task, told in TASKS.items()]
        return arms + [(f"Belt · {told}", task) for task, told in BELT.items()]

    @property
    def first(self) -> str:
        """The task that the page opens on: one that the policy that ships is good at, where it can be run here."""
        tasks = [task for _, task in self.tasks]
        return FIRST if FIRST in tasks else tasks[0]

    def drivers(self, task: str) -> list[tuple[str, str]]:
        """Who can drive it, with their names on the page."""
        return [(told, driver) for driver, told in DRIVERS.items() if task not in BELT or driver == "script"]

    def about(self, task: str, driver: str) -> str:
        """What is simulated, and who drives it."""
        lacking = f" Tasks in MuJoCo are not offered, for they lack something here: <code>{self.lacks}</code>." if self.lacks else ""
        return f'<p class="mm-about">{HAND if task in BELT else ARM + TOLD[driver]}{LOOP}{lacking}</p>'

    def chosen(self, task: str) -> tuple[Any, str]:
        """What another task changes on the page: who can drive it, and what is said of both."""
        drivers = self.drivers(task)
        return gr.Dropdown(drivers, value=drivers[0][1]), self.about(task, drivers[0][1])

    def driven(self, task: str, driver: str, thinking: int | float, before: tuple[Run, ...]) -> Iterator[Outputs]:
        """A run from its first tick to its last. Outputs: view, status, run. However the page goes away, the robot comes to rest."""
        if task not in [value for _, value in self.tasks]:
            raise InputError(f"there is no {task!r} here; choose one of the list", item="task")
        if driver not in [value for _, value in self.drivers(task)]:
            raise InputError(f"there is no {driver!r} for {task}; choose one of the list", item="policy")
        if not isinstance(thinking, (int, float)) or not 0 <= thinking <= SLOWEST:
            raise InputError(f"{thinking!r} ms, expected from 0 to {SLOWEST}", item="thinking")
        for other in before:
            other.end()
        if task in TASKS and not self.places.acquire(timeout=1.0):
            raise InputError(f"{TOGETHER} simulations run already, for other visitors; try again soon, or the belt", item="task")
        try:
            yield gr.skip(), markup.status("setting up the robot, and warming up the policy", busy=True), NOBODY
            yield from watched(_run(task, driver, thinking / 1000))
        finally:
            if task in TASKS:
                self.places.release()


def tab() -> None:
    """Draw the tab and say what happens in it."""
    here, run = RobotTab(missing()), gr.State(NOBODY)
    first = here.first
    with gr.Row(elem_classes="mm-split"):
        with gr.Column(scale=4, min_width=300, elem_classes="mm-left"):
            task = gr.Dropdown(here.tasks, value=first, label="Task", elem_id="task")
            driver = gr.Dropdown(here.drivers(first), value=here.drivers(first)[0][1], label="Policy", elem_id="driver")
            thinking = gr.Slider(0, SLOWEST, 0, step=10, label="It thinks for at least, in ms", elem_id="thinking", buttons=[])
            with gr.Row(elem_classes="mm-buttons"):
                begin = gr.Button("Run", variant="primary", elem_id="run")
                stop = gr.Button("Stop", variant="stop", elem_id="robot-stop")
            note = gr.HTML(markup.status(), elem_id="robot-status", elem_classes="mm-out")
            about = gr.HTML(here.about(first, here.drivers(first)[0][1]), elem_id="robot-about", elem_classes="mm-out")
        with gr.Column(scale=7, min_width=320, elem_classes="mm-right"):
            view = gr.HTML(blank(), elem_id="robot-view", elem_classes="mm-out")
    quiet = {"preprocess": False, "show_progress": "hidden", "api_visibility": "private"}
    failed = (gr.skip(), markup.status(), NOBODY)
    begin.click(streaming(here.driven, failed), [task, driver, thinking, run], [view, note, run], concurrency_limit=8, **quiet)
    stop.click(answering(_stopped), run, note, queue=False, **quiet)
    task.change(here.chosen, task, [driver, about], queue=False, **quiet)
    driver.change(here.about, [task, driver], about, queue=False, **quiet)


def _run(task: str, driver: str, thinking: float) -> Run:
    seed = int(time.time())
    if task in BELT:
        hand = BeltHand(task == "cue", seed)
        return Run(hand, Pondering(Script(hand), thinking))
    # whatever may be lacking for the policy is found out before there is a process to end
    learned = () if driver == "script" else (default_policy(),)
    arm = Arm(task, HELD_OUT + seed % HELD_OUT)
    policy: Policy = learned[0] if learned else Expert(arm)
    return Run(arm, Pondering(policy, thinking))


def watched(run: Run) -> Iterator[Outputs]:
    """What the page shows of a run, from its beginning on. Raises what ended it, where that was an error."""
    run.start()
    try:
        yield gr.skip(), gr.skip(), (run,)
        while run.running:
            time.sleep(EVERY)
            view = run.view
            if view is not None:
                yield drawn(view), _told(view), (run,)
        view = run.view
        if view is not None:
            yield drawn(view), markup.status(_ended(view)), NOBODY
    finally:
        run.end()


def _stopped(runs: tuple[Run, ...]) -> str:
    for run in runs:
        run.trip("stop button")
    return markup.status("stopping" if runs else "nothing runs", busy=bool(runs))


def _told(view: View) -> str:
    if view.stopped:
        return markup.status(f"emergency stop: {view.stopped}; the robot is held", busy=True)
    return markup.status(f"tick {view.tick} · {view.instruction}" + (f" · held: {view.held}" if view.held else ""), busy=True)


def _ended(view: View) -> str:
    return f"stopped by the {view.stopped}; the robot is at rest" if view.stopped else "at the end; the robot is at rest"
