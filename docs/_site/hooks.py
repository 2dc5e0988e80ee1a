"""What mkdocs does beside rendering: an order for the pages that are there, the pages that are made, links into the repository.

A page that is new in docs/ stands among the guides, or the robots', without any edit here; ORDER only says what comes first.
"""

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from choice import aims_table, choice_table
from memories import memory_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pages import bench_page, bench_tables, example_page, method_page, method_tables
from sources import BENCHES, FAMILIES, ROOT, methods

START = ("index", "quickstart", "guide")
GUIDES = ("chat", "compression", "memory", "models", "adapters", "serve", "demo", "decoding", "attention")
GUIDES += ("sparse_attention", "video_generation")
ROBOTS = ("robot_own", "robot_policy", "robot_server", "ros", "robot_memory")
APART = ("architecture",)  # stands with what is told of the project

# Files of the repository that are pages, too.
BORROWED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "mini.md": "mmsdk/models/mini/MODEL_CARD.md"}

_CODE = re.compile(r"(^```.*?^```|^    .*?$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Order the pages."""
    there = {path.stem for path in Path(config.docs_dir).glob("*.md")}
    robots = sorted(name for name in there if name.startswith(("robot", "ros")))
    guides = sorted(there - {*START, *APART, *robots})
    config.nav = [
        {"Start": [*_pages(START, there), "examples.md"]},
        {"Guides": _pages((*GUIDES, *guides), there)},
        {"Robots": _pages((*ROBOTS, *robots), there)},
        {"Methods": ["methods/index.md", *({family.title: _made(f"methods/{family.name}", family)} for family in FAMILIES)]},
        {"Benchmarks": ["benchmarks/index.md", *_made("benchmarks", BENCHES)]},
        {"Project": ["architecture.md", {"Contributing": "contributing.md"}, {"Changelog": "changelog.md"}, {"The model mini": "mini.md"}]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for family in FAMILIES:
        for method in methods(family):
            files.append(File.generated(config, f"methods/{family.name}/{method.name}.md", content=method_page(family, method)))
    for bench in methods(BENCHES):
        files.append(File.generated(config, f"benchmarks/{bench.name}.md", content=bench_page(bench)))
    files.append(File.generated(config, "examples.md", content=example_page()))
    for place, file in BORROWED.items():
        files.append(File.generated(config, place, content=(ROOT / file).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **more: Any) -> str:
    """Fill in tables, and let links to files of the repository lead to pages, or nowhere."""
    made = {"methods": method_tables, "benchmarks": bench_tables, "choice": choice_table, "aims": aims_table, "memories": memory_tables}
    for name, table in made.items():
        # the paragraph right below a marker is for readers of the file, who see no table there
        before, marker, after = markdown.partition(f"<!-- {name} -->")
        if marker:
            markdown = f"{before}{table()}\n\n{after.partition(chr(10) * 2)[2]}"
    place = page.file.src_uri
    file = Path(BORROWED.get(place, f"docs/{place}"))
    parts = _CODE.split(markdown)
    return "".join(part if _CODE.match(part) else _LINK.sub(lambda link: _link(link, file, place), part) for part in parts)


def on_page_content(html: str, **more: Any) -> str:
    """Put drawings into the page itself, so that they take its colours."""
    return re.sub(r'<img alt="([^"]*)" src="[^"]*?(images/\w+\.svg)"[^>]*>', _drawing, html)


def _pages(names: tuple[str, ...], there: set[str]) -> list[str]:
    return [f"{name}.md" for name in dict.fromkeys(names) if name in there]


def _made(folder: str, family: Any) -> list[dict[str, str]]:
    return [{method.name: f"{folder}/{method.name}.md"} for method in methods(family)]


def _link(link: re.Match[str], file: Path, place: str) -> str:
    """A link of a file of the repository, as the page that was made of it has it."""
    text, target, anchor = link[1], link[2], link[3] or ""
    found = (ROOT / file.parent / target).resolve()
    known = {ROOT / borrowed: name for name, borrowed in (*BORROWED.items(), ("examples.md", "examples/README.md"))}
    if found in known or found.is_relative_to(ROOT / "docs"):
        to = known.get(found) or found.relative_to(ROOT / "docs").as_posix()
        return f"[{text}]({relpath(to, Path(place).parent.as_posix())}{anchor})"
    return text


def _drawing(image: re.Match[str]) -> str:
    drawn = (ROOT / "docs" / image[2]).read_text(encoding="utf-8")
    return f'<div class="drawing" role="img" aria-label="{image[1]}">{drawn[drawn.index("<svg") :]}</div>'
