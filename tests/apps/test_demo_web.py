"""The demo in a real browser: headless Chromium clicks, uploads, slides and stops, on the small model with its real tokenizer.

One server and one browser for the whole file. Where a page waits for something, so does the test, for as long as a busy machine may need.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="needs the extra demo")

import torch
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from torch import Tensor

from mmsdk.apps.cli import main
from mmsdk.apps.web import main as served
from mmsdk.apps.web.arm import Arm, missing
from mmsdk.apps.web.belt import BeltHand, Script
from mmsdk.apps.web.bench import RESULTS, drawn
from mmsdk.apps.web.driving import Run
from mmsdk.apps.web.looking import Choice, Looker, Upload
from mmsdk.apps.web.main import opened
from mmsdk.apps.web.models import Models
from mmsdk.apps.web.orders import HORIZON
from mmsdk.apps.web.robot import RobotTab, watched
from mmsdk.apps.web.watching import Watcher, clip
from mmsdk.errors import InputError, ModelError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.vision.intake import Limits
from mmsdk.vla.types import Observation

MEDIA = Path(__file__).parents[2] / "apps" / "media"
PATIENCE = 40_000  # ms
"""How long a busy machine may need."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        told = "needs a browser: apt install chromium"
        if os.environ.get("CI"):
            pytest.fail(told)
        pytest.skip(told)
    with sync_playwright() as playwright:
        # root, as in CI's containers, has no sandbox
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def models(small: Mini) -> Models:
    def load(weights: str) -> Mini:
        if weights == "int4":
            raise ModelError("int4 is <b>not</b> to be had here")
        return small

    return Models(load, "small", "float32")


@pytest.fixture(scope="module")
def url(models: Models) -> Iterator[str]:
    with opened(models, megabytes=2) as address:
        models.begin("none")
        yield address


@pytest.fixture(scope="module")
def page(chromium: Browser, url: str) -> Iterator[Page]:
    """One visitor for almost all: pages take their time to come, and nobody leaves after one question."""
    yield from visiting(chromium, url)


def visiting(chromium: Browser, url: str, width: int = 1280) -> Iterator[Page]:
    """A visitor of their own: nothing is shared with another one. Nothing may be fetched from anywhere else."""
    context = chromium.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(PATIENCE)
    outside: list[str] = []
    context.on("request", lambda request: outside.append(request.url) if request.url.startswith("http") else None)
    visitor = context.new_page()
    visitor.goto(url)
    expect(visitor.locator("#figure img")).to_be_visible(timeout=PATIENCE)
    yield visitor
    context.close()
    assert all(asked.startswith(url) for asked in outside), outside


def says(place: Locator, words: str | re.Pattern[str]) -> None:
    expect(place).to_contain_text(words, timeout=PATIENCE)


def go(page: Page, tab: str) -> None:
    page.get_by_role("tab", name=tab).click()


def bring(page: Page, file: Path) -> None:
    """Upload a picture in the place of the one that is there."""
    remove = page.locator("#picture").get_by_label("Remove Image")
    if remove.is_visible():
        remove.click()
    page.locator("#picture input[type=file]").set_input_files(file)


def slide(page: Page, name: str, value: int) -> None:
    box = page.locator(f"#{name} input[type=number]")
    box.fill(str(value))
    box.press("Enter")
    box.blur()


def test_an_upload_is_asked_about_and_both_answers_are_the_pipelines(page: Page, small: Mini) -> None:
    bring(page, MEDIA / "scene.png")
    page.locator("#question textarea").fill("What is <b>it</b>?")
    slide(page, "longest", 8)
    page.locator("#ask").click()
    says(page.locator("#status"), "done in")
    pipe = Pipeline(small)
    for card, spec, kept in (("#chosen", "simplecluster:0.25", "4of 16"), ("#full", "identity", "16of 16")):
        answer = pipe(MEDIA / "scene.png", "What is <b>it</b>?", max_tokens=8, compress=spec)
        assert page.locator(f"{card} .mm-answer").inner_text().split() == str(answer).split()
        says(page.locator(f"{card} .mm-facts"), kept)
        says(page.locator(f"{card} .mm-names"), "prefill")
    says(page.locator("#figure figcaption"), "4 of 16 tokens")


def test_an_answer_can_be_stopped_and_another_one_asked_for(page: Page, models: Models) -> None:
    slide(page, "longest", 256)
    # somebody else's piece of work, which the answer waits for amid its words
    with models.turn:
        page.locator("#ask").click()
        says(page.locator("#status"), "reading")
        page.locator("#stop").click()
    says(page.locator("#status"), "stopped")
    says(page.locator("#chosen"), "stopped")
    says(page.locator("#full"), "not asked for")
    slide(page, "longest", 2)
    page.locator("#ask").click()
    says(page.locator("#status"), "done in")


def test_a_broken_upload_is_a_message_by_its_own_name_and_no_traceback(chromium: Browser, url: str, tmp_path: Path) -> None:
    """On a phone, where nothing is wider than it."""
    broken = tmp_path / "a <i>broken one.png"
    broken.write_bytes((MEDIA / "scene.png").read_bytes()[:400])
    for phone in visiting(chromium, url, 390):
        bring(phone, broken)
        phone.locator("#ask").click()
        toast = phone.locator(".toast-body").first
        says(toast, "a <i>broken one.png")
        told = toast.inner_text()
        assert "This cannot be used" in told and "Traceback" not in told and "/tmp" not in told and str(tmp_path) not in told
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_model_that_cannot_be_had_is_a_message_and_the_next_question_is_answered(page: Page) -> None:
    page.locator("#weights").get_by_text("int4").click()
    page.locator("#ask").click()
    says(page.locator(".toast-body").first, "int4 is <b>not</b> to be had here")
    expect(page.locator("#status .mm-status")).to_have_text("", timeout=PATIENCE)
    expect(page.locator("#chosen [data-testid=status-tracker]")).to_be_hidden()
    page.locator("#weights").get_by_text("int8").click()
    page.locator("#kv input").click()
    page.get_by_role("option", name="int8: in 8 bits").click()
    slide(page, "longest", 2)
    page.locator("#ask").click()
    says(page.locator("#status"), "done in")


def test_two_visitors_are_answered_at_one_time_each_about_their_own(chromium: Browser, url: str, page: Page, small: Mini) -> None:
    for other in visiting(chromium, url):
        visitors = {"Is it red?": page, "Is it blue?": other}
        for question, visitor in visitors.items():
            visitor.locator("#question textarea").fill(question)
            slide(visitor, "longest", 12)
        for visitor in visitors.values():
            visitor.locator("#ask").click()
        for question, visitor in visitors.items():
            says(visitor.locator("#status"), "done in")
            answer = Pipeline(small)(MEDIA / "scene.png", question, max_tokens=12, compress="simplecluster:0.25")
            expect(visitor.locator("#chosen .mm-answer")).to_have_text(re.compile(re.escape(str(answer)[:8])), timeout=PATIENCE)
            assert visitor.locator("#chosen .mm-answer").inner_text().split() == str(answer).split()


def test_the_slider_moves_what_is_kept_without_an_answer(page: Page) -> None:
    says(page.locator("#figure figcaption"), "4 of 16 tokens")
    before, answer = page.locator("#figure img").get_attribute("src"), page.locator("#chosen").inner_text()
    slide(page, "share", 50)
    says(page.locator("#figure figcaption"), "8 of 16 tokens")
    assert page.locator("#figure img").get_attribute("src") != before
    page.locator("#method input").click()
    page.get_by_role("option", name="uniform").click()
    says(page.locator("#figure figcaption"), "8 dropped")
    assert page.locator("#chosen").inner_text() == answer


def test_a_large_upload_is_refused(page: Page, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(b"\x89PNG" + bytes(3 * 2**20))
    bring(page, large)
    says(page.locator(".toast-body").last, re.compile("size", re.IGNORECASE))


def test_a_clip_is_watched_asked_about_and_held_in_bounds(page: Page) -> None:
    go(page, "Video")
    slide(page, "frames", 6)
    slide(page, "hold", 16)
    page.locator("#watch").click()
    says(page.locator("#clip-status"), "answered in")
    expect(page.locator("#timeline li")).to_have_count(6)
    assert sum(int(text) for text in page.locator("#timeline li b").all_inner_texts()) <= 16
    says(page.locator("#clip-answer"), "after 6 frames")
    page.locator("#clip-question textarea").fill("What comes first?")
    page.locator("#ask-now").click()
    says(page.locator("#clip-answer h3"), "What comes first?")
    says(page.locator("#clip-status"), "answered in")


def choose(page: Page, task: str) -> None:
    page.locator("#task input").click()
    page.get_by_role("option", name=task).click()


def test_the_robot_of_numbers_runs_and_stops(page: Page) -> None:
    go(page, "Robot")
    choose(page, "Belt · pick what comes by")
    says(page.locator("#robot-about"), "script that knows the simulation")
    slide(page, "thinking", 20)
    page.locator("#run").click()
    says(page.locator("#robot-status"), re.compile(r"tick \d\d"))
    expect(page.locator("#robot-view .mm-plan svg")).to_have_count(3)
    says(page.locator("#robot-view .mm-latency"), "deadline 500")
    page.locator("#robot-stop").click()
    says(page.locator("#robot-status"), "emergency stop: stop button")
    says(page.locator("#robot-status"), "the robot is at rest")


@pytest.fixture
def simulated() -> None:
    lacks = missing()
    if lacks:
        if os.environ.get("CI"):
            pytest.fail(lacks)
        pytest.skip(lacks)


def test_the_simulated_arm_moves_in_mujoco_and_stops(simulated: None, page: Page) -> None:
    go(page, "Robot")
    choose(page, "Arm · press the button")
    says(page.locator("#robot-about"), "Meta-World's own script")
    slide(page, "thinking", 20)
    page.locator("#run").click()
    expect(page.locator("#robot-view .mm-plan svg")).to_have_count(4, timeout=PATIENCE)
    first = page.locator("#robot-view .mm-arm img").get_attribute("src")
    says(page.locator("#robot-view .mm-arm figcaption").first, re.compile(r"step \d\d"))
    assert page.locator("#robot-view .mm-arm img").get_attribute("src") != first
    page.locator("#robot-stop").click()
    says(page.locator("#robot-status"), "stopped by the stop button; the robot is at rest")


def test_the_script_of_a_task_does_it_and_its_plans_come_true(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock, as fast as it goes: a plan made a few steps late begins at the observation, and the next episode is another one."""
    arm, step = Arm("button-press-topdown", 3), 0
    seen = observed(arm, step)
    first, picture = seen.state, arm.scene().pixels
    while not arm.over:
        begun, plan = seen.stamp.captured, arm.plan(seen.stamp.captured)
        for action in plan[:8]:
            step += 1
            arm.apply(action)
            seen = observed(arm, step)
        # what was done since then stands in front
        assert torch.allclose(arm.plan(begun)[:8], plan[:8], atol=1e-9)
    with monkeypatch.context() as hasty:
        hasty.setattr("mmsdk.apps.web.arm.ANSWER", 0.0)
        with pytest.raises(ModelError, match="no plan within"):
            arm.plan(begun)
    # that one comes while the next is waited for, which is of now: nothing was done since
    assert len(arm.plan(seen.stamp.captured)) == HORIZON
    assert arm.outcome == "done" and bool((first - seen.state).abs().max() > 0.05) and picture.std() > 20
    arm.begin()
    again = observed(arm, 0)
    assert not arm.over and (arm.scene().pixels != picture).any() and again.stamp.captured > seen.stamp.captured
    arm.close()
    with pytest.raises(ModelError, match="the simulation ended"):
        arm.observe()


def observed(arm: Arm, step: int) -> Observation:
    """What is observed once so many steps were done."""
    for _ in range(6000):
        with suppress(InputError):
            arm.observe()
            if arm.scene().step >= step:
                return arm.observe()
        time.sleep(0.005)
    pytest.fail("no observation came")


def test_where_simulators_are_not_installed_the_belt_is_offered_and_the_page_says_so() -> None:
    here = RobotTab("pip install 'mmsdk[robots]'")
    assert [task for _, task in here.tasks] == ["belt", "cue"] and "pip install 'mmsdk[robots]'" in here.about("belt")
    with pytest.raises(InputError, match="choose one of the list"):
        next(here.driven("drawer-open", 0, ()))


class Breaking(BeltHand):
    """Whose driver breaks in a way that nobody foresaw."""

    def apply(self, action: Tensor) -> None:
        raise ZeroDivisionError("no such thing")


def test_a_run_that_breaks_off_is_an_error_and_no_good_end() -> None:
    hand = Breaking(cued=False, seed=0)
    run = Run(hand, Script(hand))
    with pytest.raises(ModelError, match="the run broke off: ZeroDivisionError: no such thing"):
        list(watched(run))
    assert not run.running


def test_every_committed_result_is_drawn(page: Page) -> None:
    go(page, "Bench")
    results = sorted(RESULTS.glob("*.json"))
    says(page.locator("#bench"), "mmsdk bench mini")
    for path in results:
        says(page.locator("#bench"), json.loads(path.read_text())["command"].removesuffix(" --json"))
    (accuracy,) = [row["accuracy"] for row in json.loads((RESULTS / "mini.json").read_text())["rows"] if row["type"] == "scene: place"]
    row = page.locator("#bench .mm-rows > div", has_text="scene: place")
    says(row, f"{100 * accuracy:.0f} %")


def test_without_results_the_bench_tab_says_how_to_get_one(tmp_path: Path) -> None:
    assert "mmsdk bench NAME --json" in drawn(tmp_path)


def test_weights_that_failed_are_tried_again_and_wrong_choices_are_told(small: Mini) -> None:
    tried: list[str] = []

    def load(weights: str) -> Mini:
        tried.append(weights)
        if len(tried) == 1:
            raise ModelError("not yet")
        return small

    models = Models(load, "small", "float32")
    with pytest.raises(ModelError, match="not yet"):
        models.begin("int8").result()
    assert not models.ready("int8") and models.begin("int8").result() is small and models.ready("int8") and tried == ["int8", "int8"]
    with pytest.raises(ModelError, match="choose none, int8, int4"):
        models.begin("int3")
    models.close()
    # what is there is still given
    assert models.begin("int8").result() is small
    with pytest.raises(ModelError, match="the page is closing"):
        models.begin("none")


def test_asking_does_not_undo_a_stop(small: Mini) -> None:
    """A clip that is being watched ends at the stop, though a question comes before it looks."""
    models, watcher = Models(lambda weights: small, "small", "float32"), Watcher()
    video = clip(Upload(str(MEDIA / "motion.mp4"), "motion.mp4"), 8, Limits())
    watching = watcher.see(models, video, "simplecluster", 64, "none", watcher.stops)
    next(watching)
    watcher.stops += 1
    *_, (_, answer) = watcher.ask(models, "What happens?", 2, watcher.stops)
    assert answer is not None and list(watching) == [] and len(watcher.frames) == 2
    models.close()


def test_a_cache_that_remembers_knows_the_next_question_and_memory_is_told(small: Mini) -> None:
    models, looker = Models(lambda weights: small, "small", "float32"), Looker()
    picture = looker.show(Upload(str(MEDIA / "scene.png"), "scene.png"), Limits())
    first, second = (list(looker.ask(models, picture, words, Choice(kv="paged"), 4, 0))[-1] for words in ("What is it?", "What is there?"))
    assert first.answer is not None and second.answer is not None
    assert first.answer.tokens.recalled == 0 and second.answer.tokens.recalled > 0
    (dropping,) = list(looker.ask(models, picture, "What is it?", Choice(kv="snapkv:8"), 4, 0))[-1:]
    (dense,) = list(looker.ask(models, picture, "What is it?", Choice(), 4, 0))[-1:]
    assert dropping.megabytes > 0
    tokens = dense.answer.tokens.prompt + 4
    config = small.decoder.config
    assert dense.megabytes == pytest.approx(2 * config.layers * config.kv_heads * config.head_dim * 4 * tokens / 1e6, rel=0.25)
    models.close()


def test_the_port_and_the_limit_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], url: str) -> None:
    taken = url.rpartition(":")[2]
    for words, hint in (
        (["--port", taken], "cannot listen"),
        (["--port", "70000"], "no port"),
        (["--max-upload-mb", "0"], "at least 1 MB"),
        (["--kv", "nothing"], "is not known"),
        (["--dtype", "int3"], "int3"),
        (["--device", "cuda:99"], "cuda:99"),
    ):
        assert main(["demo", *words, "--json"]) == 2
        assert hint in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_command_serves_what_its_flags_say_until_it_is_told_to_end(
    small: Mini, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[object, ...]] = []

    def opening(*words: object) -> Mini:
        asked.append(words)
        os.kill(os.getpid(), signal.SIGTERM)
        return small

    monkeypatch.setattr(served, "open_model", opening)
    flags = ["--dtype", "bfloat16", "--quantize", "int8", "--kv", "snapkv:0.5", "--device", "cpu"]
    assert main(["demo", "--port", "0", "--json", *flags]) == 0
    ready = json.loads(capsys.readouterr().out)
    assert ready["url"].startswith("http://127.0.0.1:") and ready["model"] == "mini"
    assert asked == [("mini", torch.bfloat16, torch.device("cpu"), "int8", "")]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_model_that_cannot_be_loaded_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--port", "0", "--model", "minni"]) == 2
    assert "did you mean 'mini'" in capsys.readouterr().err


def test_a_broken_picture_is_told_by_the_name_its_visitor_gave_it(tmp_path: Path) -> None:
    stored = tmp_path / "0123"
    stored.write_bytes(b"nothing")
    with pytest.raises(InputError, match="holiday.png") as told:
        Looker().show(Upload(str(stored), "/home/somebody/holiday.png"), Limits())
    assert "0123" not in str(told.value) and "somebody" not in str(told.value)
