"""The demo in a real browser: headless Chromium clicks, uploads, slides and stops, on the small model with its real tokenizer.

One server and one browser for the whole file. Where a page waits for something, so does the test, for as long as a busy machine may need.
"""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio", reason="needs the extra demo")

import numpy as np
import torch
from PIL import Image, ImageSequence
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from mmsdk.apps.web.bench import RESULTS
from mmsdk.apps.web.filming import Films, Order
from mmsdk.apps.web.main import opened
from mmsdk.apps.web.making import TEXT, MakingTab, Visitor
from mmsdk.apps.web.models import Models
from mmsdk.diffusion.dit import DiT, DiTConfig
from mmsdk.diffusion.filming import VideoGeneration
from mmsdk.diffusion.imagine import Imaginer
from mmsdk.diffusion.making import Screen
from mmsdk.diffusion.rotary import Spread, Waves
from mmsdk.diffusion.words import Words
from mmsdk.errors import InputError, ModelError
from mmsdk.models.mini.family import Mini
from mmsdk.pipeline import Pipeline
from mmsdk.vision.films import animated

MEDIA = Path(__file__).parents[2] / "apps" / "media"
PATIENCE = 40_000  # ms
"""How long a busy machine may need."""
PACE = 0.2  # seconds of a step that is watched


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
def films() -> Films:
    """A model that was taught nothing, and knows the words of the sentence that is there."""
    torch.manual_seed(0)
    spread = Spread(4)
    config = DiTConfig(
        3, 3, 1, 12, 16, 1, 8, spread, (1, 4, 4), frequencies=8, order="channels_first", standing=Waves(spread), predicts="clip"
    )
    words = Words(tuple(sorted(set(TEXT.split()))), 8, 12)
    imaginer = Imaginer(DiT(config).eval(), words, Screen(4, 16, 16, 8.0, 3.0))
    return Films(lambda: VideoGeneration(imaginer, "tiny", False), "tiny")


@pytest.fixture(scope="module")
def url(models: Models, films: Films) -> Iterator[str]:
    with opened(models, megabytes=2, films=films) as address:
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
    page.get_by_role("tab", name=tab, exact=True).click()


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


def test_a_broken_upload_is_one_message_by_its_own_name_and_leaves_nothing_of_the_last(chromium: Browser, url: str, tmp_path: Path) -> None:
    """On a phone, where nothing is wider than it: one that was cut, words under a picture's name, then a picture that can be read."""
    cut, words = tmp_path / "a <i>broken one.png", tmp_path / "words.png"
    cut.write_bytes((MEDIA / "scene.png").read_bytes()[:400])
    words.write_text("These are words.")
    for phone in visiting(chromium, url, 390):
        slide(phone, "longest", 2)
        phone.locator("#ask").click()
        says(phone.locator("#status"), "done in")
        for broken in (cut, words):
            bring(phone, broken)
            toast = phone.locator(".toast-body")
            says(toast, broken.name)
            expect(phone.locator("#picture img")).to_have_count(0)
            expect(phone.locator("#figure img")).to_have_count(0)
            expect(phone.locator("#status .mm-status")).to_have_text("", timeout=PATIENCE)
            for card in ("#chosen", "#full"):
                says(phone.locator(card), "no answer yet")
            told = toast.inner_text()
            assert told.count("This cannot be used") == 1 and "Error (" not in told
            assert "Traceback" not in told and "/tmp" not in told and str(tmp_path) not in told
            phone.locator(".toast-close").click()
            expect(toast).to_have_count(0)
        assert phone.evaluate("document.documentElement.scrollWidth") <= 390
        bring(phone, MEDIA / "scene.png")
        says(phone.locator("#figure figcaption"), "4 of 16 tokens")


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
            # all of it: the status may be that of an earlier answer, and text comes word by word
            whole = r"\s+".join(map(re.escape, str(answer).split()))
            expect(visitor.locator("#chosen .mm-answer")).to_have_text(re.compile(rf"^\s*{whole}\s*$"), timeout=PATIENCE)


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


def test_a_clip_is_made_of_a_sentence_and_what_cannot_be_read_is_told(page: Page, films: Films) -> None:
    go(page, "Video generation")
    slide(page, "film-steps", 4)
    page.locator("#film-attention input").click()
    page.get_by_role("option", name="nabla").click()
    page.locator("#film-two-stage input").check()
    page.locator("#film-make").click()
    says(page.locator("#film-status"), "made in")
    clip = films.pipe()(TEXT, steps=4, guidance=3.0, attention="nabla", two_stage=True)
    source = page.locator("#film img").get_attribute("src") or ""
    shown, other = base64.b64decode(source.partition(",")[2]), films.pipe()(TEXT, steps=4, guidance=3.0, two_stage=True, seed=1)
    # the last bit of a number may depend on the thread, and all colours of a GIF's table on one pixel
    assert apart(shown, animated(clip)) < 4 < apart(shown, animated(other))
    says(page.locator("#film .mm-facts"), f"{clip.cost.passes}")
    page.locator("#film-text textarea").fill("a <b>green</b> ball")
    page.locator("#film-make").click()
    says(page.locator(".toast-body").last, "is none of them")
    expect(page.locator("#film-status .mm-status")).to_have_text("", timeout=PATIENCE)


def apart(one: bytes, other: bytes) -> float:
    """By how much of 255 the pixels of two films differ, in the mean."""
    films = ([frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(io.BytesIO(content)))] for content in (one, other))
    mine, theirs = (np.stack([np.asarray(frame, float) for frame in frames]) for frames in films)
    return float(abs(mine - theirs).mean()) if mine.shape == theirs.shape else 255.0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are told of, in order; each takes its time, so that one can leave between two of them."""
    taken, plain = list[int](), VideoGeneration.__call__

    def slowly(pipe: VideoGeneration, *given: Any, advance: Callable[[int], None], **settings: Any) -> Any:
        def told(step: int) -> None:
            taken.append(step)
            time.sleep(PACE)
            advance(step)

        return plain(pipe, *given, advance=told, **settings)

    monkeypatch.setattr(VideoGeneration, "__call__", slowly)
    return taken


@pytest.mark.parametrize("two_stage", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
def test_a_clip_can_be_cancelled_before_and_amid_its_steps(
    page: Page, films: Films, steps: list[int], waiting: bool, two_stage: bool
) -> None:
    """Many steps, of which most are never taken; the next one is made at once."""
    go(page, "Video generation")
    page.locator("#film-text textarea").fill(TEXT)
    page.locator("#film-two-stage input").set_checked(two_stage)
    slide(page, "film-steps", 60)
    # somebody else's clip, which this one waits for
    with films._lock if waiting else contextlib.nullcontext():
        page.locator("#film-make").click()
        says(page.locator("#film-status"), "loading tiny" if waiting else re.compile(r"step \d+ of 60"))
        page.locator("#film-stop").click()
        says(page.locator("#film-status"), "stopped")
    slide(page, "film-steps", 2)
    page.locator("#film-make").click()
    says(page.locator("#film-status"), "made in")
    taken = steps[:-2]
    # those of a coarse stage are spread over the steps that it stands for
    assert steps[-2:] == [1, 2] and taken == (sorted(set(taken)) if two_stage else list(range(1, len(taken) + 1))) and len(steps) < 40


def test_a_program_that_ends_waits_for_one_step(films: Films, steps: list[int]) -> None:
    own = Films(films.pipe, "tiny")
    told = own.make(Order(TEXT, steps=60), lambda: False)
    while next(told).step < 2:
        pass
    own.close()
    assert all(progress.clip is None for progress in told)
    own._pool.shutdown(wait=True)
    assert len(steps) < 40


@pytest.mark.parametrize("guidance", [None, "x", float("nan"), 9])
def test_guidance_that_is_no_number_of_the_slider_is_told_by_name(films: Films, guidance: Any) -> None:
    with pytest.raises(InputError, match="guidance: it is .*expected from 1 to 8"):
        next(MakingTab(films).make(TEXT, 0, 2, guidance, "dense", "none", False, Visitor()))


def choose(page: Page, task: str) -> None:
    choose_in(page, "task", task)


def choose_in(page: Page, field: str, option: str) -> None:
    page.locator(f"#{field} input").click()
    page.get_by_role("option", name=option).click()


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


@pytest.mark.parametrize(("driver", "about"), [("the policy that ships", "the one that ships"), ("a script", "Meta-World's own script")])
def test_the_simulated_arm_moves_in_mujoco_and_stops(simulated: None, page: Page, driver: str, about: str) -> None:
    go(page, "Robot")
    choose(page, "Arm · press the button")
    choose_in(page, "driver", driver)
    says(page.locator("#robot-about"), about)
    slide(page, "thinking", 20)
    page.locator("#run").click()
    expect(page.locator("#robot-view .mm-plan svg")).to_have_count(4, timeout=PATIENCE)
    first = page.locator("#robot-view .mm-arm img").first.get_attribute("src")
    says(page.locator("#robot-view .mm-arm figcaption").first, re.compile(r"step \d\d"))
    assert first is not None
    expect(page.locator("#robot-view .mm-arm img").first).not_to_have_attribute("src", first, timeout=PATIENCE)
    expect(page.locator("#robot-view .mm-eyes img")).to_have_count(2)
    page.locator("#robot-stop").click()
    says(page.locator("#robot-status"), "stopped by the stop button; the robot is at rest")


def test_every_committed_result_is_drawn(page: Page) -> None:
    go(page, "Bench")
    results = sorted(RESULTS.glob("*.json"))
    says(page.locator("#bench"), "mmsdk bench mini")
    for path in results:
        says(page.locator("#bench"), json.loads(path.read_text())["command"].removesuffix(" --json"))
    (accuracy,) = [row["accuracy"] for row in json.loads((RESULTS / "mini.json").read_text())["rows"] if row["type"] == "scene: place"]
    row = page.locator("#bench .mm-rows > div", has_text="scene: place")
    says(row, f"{100 * accuracy:.0f} %")
