"""What the demo is made of, without a browser: models, answers, runs of robots, and the command that serves the page."""

import html
import json
import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="needs the extra demo")

import torch
from torch import Tensor

from mmsdk import plugins
from mmsdk.apps.cli import main
from mmsdk.apps.web import main as served
from mmsdk.apps.web.arm import Arm
from mmsdk.apps.web.belt import BeltHand, Script
from mmsdk.apps.web.bench import drawn
from mmsdk.apps.web.driving import Run
from mmsdk.apps.web.looking import Choice, Looker, Upload
from mmsdk.apps.web.models import Models
from mmsdk.apps.web.orders import HORIZON
from mmsdk.apps.web.robot import RobotTab, watched
from mmsdk.apps.web.watching import Watcher, clip
from mmsdk.errors import InputError, ModelError
from mmsdk.models.mini.family import Mini
from mmsdk.vision.intake import Limits
from mmsdk.vla.envs.metaworld import TASKS
from mmsdk.vla.types import Observation

MEDIA = Path(__file__).parents[2] / "apps" / "media"


def test_the_script_of_a_task_does_it_and_its_plans_come_true(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock, as fast as it goes: a plan made a few steps late begins at the observation, and the next episode is another one."""
    arm, step = Arm("button-press-topdown-v3", 3), 0
    seen = observed(arm, step)
    first, picture = seen.state, arm.scene().pixels
    while not arm.over:
        begun, plan = seen.stamp.captured, arm.plan(seen.stamp.captured)
        # the arm's own cameras look at every third step
        for action in plan[:9]:
            step += 1
            arm.apply(action)
            seen = observed(arm, step)
        # what was done since then stands in front
        assert torch.allclose(arm.plan(begun)[:9], plan[:9], atol=1e-9)
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
    here = RobotTab("pip install '.[robots]' in the clone")
    assert [task for _, task in here.tasks] == ["belt", "cue"] and "pip install '.[robots]' in the clone" in here.about("belt", "script")
    with pytest.raises(InputError, match="choose one of the list"):
        next(here.driven("drawer-open-v3", "script", 0, ()))


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


def test_the_page_opens_on_a_task_that_the_policy_is_good_at() -> None:
    assert RobotTab("").first == "drawer-open-v3" in TASKS
    assert RobotTab("pip install '.[robots]' in the clone").first == "belt"


def kept(folder: Path, bench: str, rows: list[dict[str, object]]) -> str:
    """What the tab of benches shows of these rows, without its tags, a space between two."""
    hardware, versions = {"cpu": "a processor", "cores": 2}, {"torch": "2", "commit": "abc"}
    result = {"command": f"mmsdk bench {bench} --json", "hardware": hardware, "versions": versions, "rows": rows}
    (folder / f"{bench}.json").write_text(json.dumps(result))
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", drawn(folder))).split())


def test_what_memories_keep_is_a_table_a_suite_in_percent_and_megabytes(tmp_path: Path) -> None:
    """A line for each policy, whatever budgets it was measured at; what was not measured beside the full cache stands below, or nowhere."""

    def row(
        suite: str, policy: str, budget: float, quality: float | None, full: float | None, frames: int | None = None
    ) -> dict[str, object]:
        told = {"suite": suite, "policy": policy, "budget": budget, "quality": quality, "quality_full": full, "frames": frames}
        return told | {"bytes_held": int(130e6 * budget), "bytes_read_per_token": int(40e6 * budget), "tok_s": 24.2}

    rows = [row("text", "full", 1.0, 0.04, 0.04), row("text", "santa", 0.5, 0.03, 0.04), row("text", "santa", 0.15, 0.01, 0.04)]
    rows += [row("text", "h2o", 0.1, 0.02, 0.04), row("text", "re-prefill", 0.13, 0.04, None)]
    rows += [row("stream", "full", 1.0, 0.5, 0.5, 64), row("stream", "watch evs", 0.25, 0.5, 0.5, 64)]
    rows += [row("stream", "h2o, going on", 0.1, 0.75, 0.8, 10_000)]
    text, stream = kept(tmp_path, "memory", rows).split("Memory of streams")
    assert "Memory of long texts" in text and "the full cache gives, 4 %" in text and "re-prefill" not in text and "0.15" not in text
    assert "policy 50 % 10 % held, MB" in text and "full cache 100 % 100 % 130 40 24.2 santa 75 % h2o 50 % 13 4 24.2" in text
    assert (
        "policy 25 % held" in stream
        and "are those at 25 %" in stream
        and "watch evs 100 % 32.5 10 24.2" in stream
        and "policy frames right held, MB" in stream
        and "h2o 10,000 75 % 13 4 24.2" in stream
    )
    assert not re.search(r"quality|tok s|going on\b(?!,)|bytes|_", re.sub("Streams that go on", "", text + stream))


def test_a_server_under_load_is_told_in_words_and_units(tmp_path: Path) -> None:
    row = {"requests": 200, "concurrency": 16, "cancelled": 20, "malformed": 19, "lost": 0, "leaked_blocks": 3}
    told = kept(tmp_path, "server", [row | {"p95_ttft_ms": 2189.75, "rss_growth_mb": 6.625}])
    assert "200 times, 16 at one time; 20 leave early and 19 ask nonsense" in told
    assert "answers lost 0 of 200 requests blocks left behind 3 of keys and values" in told
    assert "2.19 s, to the first token the process grew by 6.6 MiB" in told
    assert "within - s" in kept(tmp_path, "server", [row | {"p95_ttft_ms": None, "rss_growth_mb": -1.5}])


def test_asking_again_is_drawn_and_a_result_without_a_drawing_has_its_benchs_words(tmp_path: Path) -> None:
    again = kept(tmp_path, "followup", [{"media": "clip", "asked": "paged again", "encode_ms": 0.0, "total_ms": 431.7}])
    assert "Asking again" in again and "clip · paged again 432 ms" in again
    plain = kept(tmp_path, "robot", [{"what": "a run", "step_ms": 4.26, "decode_tok_s": 7.5}] * 30)
    assert "what step, ms decode tokens a second a run 4.26 7.50" in plain and "6 more rows: mmsdk bench robot --committed" in plain
    assert plugins.about("mmsdk.apps.bench", "robot").partition(": ")[2][1:] in plain


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


def test_the_port_and_the_limit_are_checked_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        for words, hint in (
            (["--port", str(door.getsockname()[1])], "cannot listen"),
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
