"""The demo in a real browser: headless Chromium clicks, uploads, slides and stops, on the small model with its real tokenizer.

One server and one browser for the whole file. Where a page waits for something, so does the test, for as long as a busy machine may need.
"""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="needs the extra demo")

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from mmsdk.apps.cli import main
from mmsdk.apps.web import main as served
from mmsdk.apps.web.bench import RESULTS, drawn
from mmsdk.apps.web.looking import Choice, Looker, Upload
from mmsdk.apps.web.main import opened
from mmsdk.apps.web.models import Models
from mmsdk.errors import InputError, ModelError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.vision.intake import Limits

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


@pytest.fixture
def page(chromium: Browser, url: str) -> Iterator[Page]:
    yield from visiting(chromium, url)


@pytest.fixture(scope="module")
def tour(chromium: Browser, url: str) -> Iterator[Page]:
    """One visitor for all tabs but the first, which know nothing of each other."""
    yield from visiting(chromium, url)


@pytest.fixture
def other(chromium: Browser, url: str) -> Iterator[Page]:
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
    page.locator("#picture").get_by_label("Remove Image").click()
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


def test_the_slider_moves_what_is_kept_without_an_answer(page: Page) -> None:
    says(page.locator("#figure figcaption"), "4 of 16 tokens")
    before = page.locator("#figure img").get_attribute("src")
    slide(page, "share", 50)
    says(page.locator("#figure figcaption"), "8 of 16 tokens")
    assert page.locator("#figure img").get_attribute("src") != before
    page.locator("#method input").click()
    page.get_by_role("option", name="uniform").click()
    says(page.locator("#figure figcaption"), "8 dropped")
    says(page.locator("#chosen"), "no answer yet")


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


@pytest.mark.parametrize("width", [1280, 390])
def test_a_broken_upload_is_a_message_by_its_own_name_and_no_traceback(chromium: Browser, url: str, tmp_path: Path, width: int) -> None:
    broken = tmp_path / "a <i>broken one.png"
    broken.write_bytes((MEDIA / "scene.png").read_bytes()[:400])
    for page in visiting(chromium, url, width):
        bring(page, broken)
        page.locator("#ask").click()
        toast = page.locator(".toast-body").first
        says(toast, "a <i>broken one.png")
        told = toast.inner_text()
        assert "This cannot be used" in told and "Traceback" not in told and "/tmp" not in told and str(tmp_path) not in told
        # nothing is wider than a phone
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_model_that_cannot_be_had_is_a_message_and_the_next_question_is_answered(page: Page) -> None:
    page.locator("#weights").get_by_text("int4").click()
    page.locator("#ask").click()
    says(page.locator(".toast-body").first, "int4 is <b>not</b> to be had here")
    expect(page.locator("#status .mm-status")).to_have_text("", timeout=PATIENCE)
    expect(page.locator("#chosen [data-testid=status-tracker]")).to_be_hidden()
    page.locator("#weights").get_by_text("int8").click()
    slide(page, "longest", 2)
    page.locator("#ask").click()
    says(page.locator("#status"), "done in")


def test_a_large_upload_is_refused(page: Page, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(b"\x89PNG" + bytes(3 * 2**20))
    bring(page, large)
    says(page.locator(".toast-body").first, re.compile("size", re.IGNORECASE))


def test_two_visitors_are_answered_at_one_time_each_about_their_own(page: Page, other: Page, small: Mini) -> None:
    visitors = {"Is it red?": page, "Is it blue?": other}
    for question, visitor in visitors.items():
        visitor.locator("#question textarea").fill(question)
        slide(visitor, "longest", 12)
    for visitor in visitors.values():
        visitor.locator("#ask").click()
    for question, visitor in visitors.items():
        says(visitor.locator("#status"), "done in")
        answer = Pipeline(small)(MEDIA / "scene.png", question, max_tokens=12, compress="simplecluster:0.25")
        assert visitor.locator("#chosen .mm-answer").inner_text().split() == str(answer).split()


def test_a_clip_is_watched_asked_about_and_held_in_bounds(tour: Page) -> None:
    go(tour, "Video")
    slide(tour, "frames", 6)
    slide(tour, "hold", 16)
    tour.locator("#watch").click()
    says(tour.locator("#clip-status"), "answered in")
    expect(tour.locator("#timeline li")).to_have_count(6)
    assert sum(int(text) for text in tour.locator("#timeline li b").all_inner_texts()) <= 16
    says(tour.locator("#clip-answer"), "after 6 frames")
    tour.locator("#clip-question textarea").fill("What comes first?")
    tour.locator("#ask-now").click()
    says(tour.locator("#clip-answer h3"), "What comes first?")
    says(tour.locator("#clip-status"), "answered in")


def test_the_robot_runs_and_stops(tour: Page) -> None:
    go(tour, "Robot")
    says(tour.locator(".mm-about").first, "script that knows the simulation")
    slide(tour, "thinking", 20)
    tour.locator("#run").click()
    says(tour.locator("#robot-status"), re.compile(r"tick \d\d"))
    expect(tour.locator("#robot-view .mm-plan svg")).to_have_count(3)
    says(tour.locator("#robot-view .mm-latency"), "deadline 500")
    tour.locator("#robot-stop").click()
    says(tour.locator("#robot-status"), "emergency stop: stop button")
    says(tour.locator("#robot-status"), "the hand is at rest")


def test_every_committed_result_is_drawn(tour: Page) -> None:
    go(tour, "Bench")
    results = sorted(RESULTS.glob("*.json"))
    says(tour.locator("#bench"), "mmsdk bench mini")
    for path in results:
        says(tour.locator("#bench"), json.loads(path.read_text())["command"].removesuffix(" --json"))
    (accuracy,) = [row["accuracy"] for row in json.loads((RESULTS / "mini.json").read_text())["rows"] if row["type"] == "scene: place"]
    row = tour.locator("#bench .mm-rows > div", has_text="scene: place")
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


def test_a_cache_that_remembers_knows_the_next_question_and_memory_is_told(small: Mini) -> None:
    models, looker = Models(lambda weights: small, "small", "float32"), Looker()
    picture = looker.show(Upload(str(MEDIA / "scene.png"), "scene.png"), Limits())
    first, second = (list(looker.ask(models, picture, words, Choice(kv="paged"), 4))[-1] for words in ("What is it?", "What is there?"))
    assert first.answer is not None and second.answer is not None
    assert first.answer.tokens.recalled == 0 and second.answer.tokens.recalled > 0
    (dense,) = list(looker.ask(models, picture, "What is it?", Choice(), 4))[-1:]
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
    ):
        assert main(["demo", *words, "--json"]) == 2
        assert hint in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_command_serves_until_it_is_told_to_end(
    small: Mini, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served, "open_model", lambda *asked: small)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert main(["demo", "--port", "0", "--json"]) == 0
    ready = json.loads(capsys.readouterr().out)
    assert ready["url"].startswith("http://127.0.0.1:") and ready["model"] == "mini"
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
