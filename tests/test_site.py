"""The site is built as `make docs` builds it, with warnings as errors, and looked at: pages, tables, what it would load from elsewhere."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from mmsdk import plugins
from mmsdk.apps.compression.aims import aims

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """The modules that make pages, and read methods."""
    monkeypatch.syspath_prepend(DOCS / "_site")
    return import_module("pages"), import_module("sources")


class Loaded(HTMLParser):
    """What a page loads, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif tag == "link":
            self.sources.append(found.get("href") or "")
        elif found.get("src"):
            self.sources.append(found["src"] or "")


def test_every_page_is_there_and_in_the_order_of_pages(site: Path) -> None:
    links = {link.split("#")[0] for link in Loaded((site / "index.html").read_text(encoding="utf-8")).links}
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert len(pages) >= 14 and pages <= links | {"index.html"}
    assert all((site / page).is_file() for page in pages)


def test_a_new_page_needs_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_site")
    hooks = import_module("hooks")
    for name in ("index", "guide", "serve", "a_new_guide", "robot_new"):
        (tmp_path / f"{name}.md").touch()
    start, guides, robots, *_ = hooks.on_config(SimpleNamespace(docs_dir=str(tmp_path), nav=None)).nav
    assert start == {"Start": ["index.md", "guide.md", "examples.md"]}
    assert (guides, robots) == ({"Guides": ["serve.md", "a_new_guide.md"]}, {"Robots": ["robot_new.md"]})


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        for source in Loaded(path.read_text(encoding="utf-8")).sources:
            assert not re.match(r"(\w+:)?//", source), f"{path.name} loads {source}"
    for path in site.rglob("*.css"):
        assert not re.search(r"""(@import|url\()\s*["']?(https?:)?//""", path.read_text(encoding="utf-8")), path.name


def test_every_method_has_a_page_with_its_knobs_and_its_paper(site: Path) -> None:
    folders = {"compress": "mmsdk.tokencomp.methods", "policies": "mmsdk.kv.policies", "step-caches": "mmsdk.diffusion.step_caches"}
    folders |= {"video-attention": "mmsdk.diffusion.attention.methods"}
    for folder, package in folders.items():
        for name in plugins.available(package):
            page = (site / "methods" / folder / f"{name}.html").read_text(encoding="utf-8")
            for knob, default in plugins.knobs(package, name).items():
                row = re.search(rf"<td><code>{knob}</code></td>\n<td>.*</td>\n<td><code>(.*)</code></td>", page)
                assert default == "required" or (row is not None and eval(row[1]) == eval(default)), f"{name}: {knob}"
    papers = {"video-attention": "svg2", "attention": "mla", "heads": "pi0", "kv": "rounding", "layers": "moe", "chunking": "rtc"}
    for family, name in (*papers.items(), ("robot-memory", "dual")):
        assert "https://arxiv.org/abs/" in (site / "methods" / family / f"{name}.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("family", "name", "mark"),
    [
        ("compress", "divprune", "published"),
        ("compress", "tome", "published, parts ours"),
        ("compress", "p4q", "reconstruction"),
        ("compress", "braco", "reconstruction"),
        ("compress", "dora", "reconstruction"),
        ("compress", "random", ""),
        ("heads", "latte", "reconstruction"),
        ("heads", "pi0", "published"),
        ("video-attention", "svg", "published, parts ours"),
    ],
)
def test_pages_say_what_is_published(family: str, name: str, mark: str, making: tuple[ModuleType, ModuleType]) -> None:
    pages, sources = making
    (found,) = (method for method in sources.methods(sources.family_of(family)) if method.name == name)
    assert found.mark == mark
    assert (f"<b>follows</b> {mark}</span>" in pages.method_page(sources.family_of(family), found)) == bool(mark)


def test_docstrings_are_plain_text(making: tuple[ModuleType, ModuleType]) -> None:
    pages, _ = making
    assert pages.prose("a_b * c < d | [n d] `x_y`") == r"a\_b \* c &lt; d &#124; \[n d\] `x_y`"
    assert pages.prose("One.\n\n    y = a * b\n    z = y\n\nTwo (arXiv 2502.11089).").split("\n\n") == [
        "One.",
        "```text\ny = a * b\nz = y\n```",
        "Two (arXiv [2502.11089](https://arxiv.org/abs/2502.11089)).",
    ]
    said = pages.prose("Source: A, arXiv 2502.11089. Published: one; two. Ours: three. Ours is only four: five.").split("\n\n")
    assert [re.sub(r"<.*?> ", "", part.split("\n")[0]) for part in said][1:] == ["One; two.", "Three.", "Ours is only four: five."]
    assert [part.split(".said-")[1].strip(" }") for part in said] == ["source", "published", "ours", "ours"]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_tables_of_benches_are_the_kept_results(path: Path, site: Path) -> None:
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    page = (site / "benchmarks" / f"{path.stem}.html").read_text(encoding="utf-8")
    table = page[page.index('<h2 id="result">') :].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.partition("<tbody>")[2].split("</tr>")[:-1]]
    if len(cells) != len(rows):
        # so wide a table is turned: a line for each measure, and above the columns what is no number
        names = [name for name, value in rows[0].items() if not isinstance(value, str)]
        assert len(rows[0]) > 9 and [line[0] for line in cells] == [name.replace("_", " ") for name in names]
        cells = [list(column) for column in zip(*(line[1:] for line in cells), strict=True)]
        rows = [{name: row[name] for name in names} for row in rows]
    assert len(cells) == len(rows)
    for shown, row in zip(cells, rows, strict=True):
        for text, value in zip(shown, row.values(), strict=True):
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert float(text.replace(",", "")) == pytest.approx(value, rel=0.006, abs=1e-12)


@pytest.mark.parametrize("marked", ["memory", "compression", "benchmarks/index", "methods/index"])
def test_where_the_site_has_a_table_the_file_says_what_prints_it(marked: str, site: Path) -> None:
    """Readers of the file see the paragraph below the marker, readers of the site the table in its place, and what comes after both."""
    _, marker, rest = (DOCS / f"{marked}.md").read_text(encoding="utf-8").partition("\n<!-- ")
    line, _, after = rest.partition(" -->\n")[2].partition("\n\n")
    assert marker and re.fullmatch(r"\*.*`make docs`.*`mmsdk [a-z]+.*`.*\*\n?", line, re.DOTALL)
    page = (site / f"{marked}.html").read_text(encoding="utf-8")
    assert "In the built site" not in page and "<!-- " not in page.partition("<article")[2]
    assert "<table>" in page or "is kept yet." in page
    assert all(f">{head}<" in page for head in re.findall(r"^## ([\w ]+)$", after, re.MULTILINE))


def test_the_drawing_takes_the_colours_of_the_page(site: Path) -> None:
    page = (site / "architecture.html").read_text(encoding="utf-8")
    assert (
        '<div class="drawing" role="img" aria-label="Packages' in page and "var(--ink" in page and "<img" not in page.split("<article")[1]
    )


def test_the_table_of_compression_is_the_kept_result(making: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each method and medium, shares of what the uncompressed model answers, and whole answers beside; nothing without one."""

    def row(method: str, media: str, share: float, accuracy: float | None, speedup: float) -> dict[str, str | float | None]:
        told = {"method": method, "stage": "projector", "media": media, "retention": share, "batch": 4, "n": 50, "accuracy": accuracy}
        return told | {"accuracy_full": 0.8, "compress_ms": 6.0, "speedup": speedup}

    methods = ("identity", "deft", "braco-trained")
    shares = {"identity": (1.0,), "deft": (0.25, 0.1, 0.01), "braco-trained": (11 / 256,)}
    rows = [row(name, media, share, 0.4 + share / 4, 1.5) for name in methods for media in ("image", "clip") for share in shares[name]]
    rows += [row("identity", "clip of 16 frames", 1.0, None, 1.0), row("tome", "clip of 16 frames", 0.1, None, 2.25)]
    hardware, versions = {"cpu": "a processor", "cores": 2, "memory_gb": 8}, {"commit": "abc", "torch": "2"}
    result = {"command": "mmsdk bench compress --json", "hardware": hardware, "versions": versions, "rows": rows}
    result["aims"] = [{"aim": "deft", "wanted": "90 % of full", "reached": "87 % of full", "met": "no"}]
    choice = import_module("choice")
    monkeypatch.setattr(choice, "kept_result", lambda name: result if name == "compress" else None)
    rows += [row("tome", "image, in turn", 0.5, None, 3.25)]
    made = choice.choice_table()
    assert made.count("| deft | projector | 58 % | 53 % | 50 % | 1.5 | 1.50 |") == 2 and "2.25 times with `tome`" in made
    assert "braco-trained, at 4.3%: 51 %" in made and "identity |" not in made and "50 questions" in made and "3.25" not in made
    assert "| deft | 90 % of full | 87 % of full | no |" in choice.aims_table()
    assert choice.readme_table().endswith("| --- | --- | --- | --- | --- | --- |\n| `deft` | projector | 53 % | 50 % | 53 % | 50 % |")
    monkeypatch.setattr(choice, "kept_result", lambda name: None)
    assert choice.choice_table() == choice.aims_table() == "No result of `mmsdk bench compress` is kept yet."


def test_why_an_aim_was_missed_is_said_of_each() -> None:
    """The kept aims are those of the kept rows, and of each that was missed, by its first word, the page has a paragraph."""
    path = ROOT / "benchmarks" / "results" / "compress.json"
    if path.is_file():
        result, page = json.loads(path.read_text(encoding="utf-8")), (DOCS / "compression.md").read_text(encoding="utf-8")
        assert result["aims"] == aims(result["rows"])
        missed = {re.split(r"\W", aim["aim"])[0] for aim in result["aims"] if aim["met"] == "no"}
        section = page.partition("## What was aimed at")[2].partition("\n## ")[0]
        assert {name for name in missed if f"**{name}" not in section} == set()


def test_a_memory_is_chosen_by_shares_of_what_the_full_cache_answers(
    making: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every suite a line for each policy; nothing without a kept result."""

    def row(policy: str, budget: float, quality: float | None) -> dict[str, object]:
        told = {"suite": "needle", "policy": policy, "budget": budget, "quality": quality, "quality_full": None if quality is None else 0.8}
        return told | {"bytes_held": 1000 * budget, "bytes_read_per_token": 500 * budget, "tok_s": 20 / (1 + budget)}

    rows = [row("full", 1.0, 0.8), row("snapkv", 0.5, 0.6), row("snapkv", 0.1, 0.4), row("h2o, going on", 0.1, None)]
    rows += [row("snapkv", 0.15, 0.6), row("kv-streams", 0.2, 0.0227) | {"quality_full": None}]
    keys = ("policy", "quality", "ci_low", "ci_high", "n", "bytes_held", "frames", "against", "better", "worse", "p")
    streams = [
        ("full", 0.75, 0.63, 0.84, 64, 6_355_440, 64, None, None, None, None),
        ("window", 0.03, 0.01, 0.11, 64, 1_513_200, 64, None, None, None, None),
        ("h2o", 0.62, 0.5, 0.73, 64, 1_567_440, 64, "streaming", 40, 3, 1e-9),
        ("h2o, going on", 0.47, 0.31, 0.64, 32, 6_100_000, 10_000, "streaming", 15, 1, 5e-4),
    ]
    same = {"suite": "stream", "budget": 0.25, "quality_full": 0.75, "tok_s": 251.2}
    rows += [same | dict(zip(keys, one, strict=True)) for one in streams]
    hardware, versions = {"cpu": "a processor", "cores": 2, "memory_gb": 8}, {"commit": "abc", "torch": "2"}
    result = {"command": "mmsdk bench memory --json", "hardware": hardware, "versions": versions, "rows": rows}
    memories = import_module("memories")
    monkeypatch.setattr(memories, "kept_result", lambda name: result if name == "memory" else None)
    made = memories.memory_tables()
    assert "| `snapkv` | 75 % |  | 50 % |  |  | 10 % | 10 % | 1.82 |" in made and "going on" not in made and "`full`" not in made
    assert "`snapkv` at 15 %: 75 %, for 15 % of what everything takes to read." in made
    assert "in a window of 20 % of it: `kv-streams` 0.0227 at 17 tokens a second." in made
    assert "64 questions; everything held (6.36 MB): 75 % (63 to 84)" in made
    assert "| `h2o` | 62 % (50 to 73) | 40 more, 3 fewer than `streaming` (p = 1e-09) | 1.57 |" in made
    assert "| `window` | 3 % (1 to 11) |  | 1.51 |" in made
    assert "| `h2o` | 10,000 | 47 % (31 to 64) | 15 more, 1 fewer than `streaming` (p = 0.0005) | 6.10 | 251 |" in made
    monkeypatch.setattr(memories, "kept_result", lambda name: None)
    assert memories.memory_tables() == "No result of `mmsdk bench memory` is kept yet."
