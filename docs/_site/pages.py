"""Pages of the site that are made, not written: one for each method and each bench, and the tables of both."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sources import BENCHES, FAMILIES, ROOT, Family, Field, Method, Public, methods

__all__ = ["bench_page", "bench_tables", "example_page", "kept_result", "method_page", "method_tables", "prose", "table", "where"]

RESULTS = ROOT / "benchmarks" / "results"
FEW = 12  # rows of a result that the page of all benches shows
WIDE = 10  # columns that go beyond the edge of a page
IMPORTS = {"tokencomp": "mmsdk.tokencomp", "vla": "mmsdk.vla", "apps": "mmsdk.apps"}

_LABEL = re.compile(r"(?:^|(?<=[.)] ))(Source|Published|Ours|Reconstruction)\b([^:.]{0,70}):\s+")
_SPECIAL = {"<": "&lt;", ">": "&gt;", "|": "&#124;", **{character: f"\\{character}" for character in "\\*_[]#"}}


def prose(text: str) -> str:
    """Markdown of a docstring, which is plain text: code in backticks, blocks that are indented, numbered items, papers as links."""
    return "\n\n".join(made for paragraph in re.split(r"\n\s*\n", text.strip("\n")) for made in _paragraph(paragraph))


def method_page(family: Family, method: Method) -> str:
    """The page of a method."""
    first, _, rest = method.text.partition("\n\n")
    parts = [
        f"---\ntitle: {method.name}\n---",
        f"# {method.name}",
        f"{prose(first)}\n{{: .lead }}",
        _facts(method),
        prose(rest),
        *(_plugin(family, method) if family.plugins and len(method.public) == 1 else _exports(method)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def method_tables() -> str:
    """All methods of all families, with links to their pages."""
    parts = []
    for family in FAMILIES:
        rows = [
            {
                "": f"[{method.name}]({family.name}/{method.name}.md)",
                "what it does": _inline(method.first),
                "paper": ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in method.papers),
                "follows": method.mark,
            }
            for method in methods(family)
        ]
        parts.append(f"## {family.title}\n\n{family.about}\n\n{table(rows)}")
    return "\n\n".join(parts)


def bench_page(method: Method) -> str:
    """The page of a bench: what it measures, its knobs, and all rows of the result that is kept."""
    first, _, rest = method.text.partition("\n\n")
    result = kept_result(method.name)
    kept = f"{where(result)}\n\n{_rows(result['rows'])}" if result else "No result of this bench is kept yet."
    head = [f"---\ntitle: {method.name}\n---", f"# {method.name}", f"{prose(first)}\n{{: .lead }}", prose(rest)]
    return "\n\n".join(part for part in [*head, *_plugin(BENCHES, method), "## Result", kept] if part) + "\n"


def bench_tables() -> str:
    """Every bench that has a kept result with its first rows, and the names of the others."""
    parts, without = [], []
    for method in methods(BENCHES):
        result, link = kept_result(method.name), f"[{method.name}]({method.name}.md)"
        if result is None:
            without.append({"bench": link, "what it measures": _inline(method.first)})
            continue
        rows = result["rows"]
        more = f"\n\n[All {len(rows)} rows]({method.name}.md)" if len(rows) > FEW else ""
        parts.append(f"## {method.name}\n\n{_inline(method.first)}\n\n{where(result)}\n\n{_rows(rows[:FEW])}{more}")
    return "\n\n".join([*parts, f"## Without a kept result\n\n{table(without)}"])


def example_page() -> str:
    """What examples/README.md says, then every script as it is."""
    folder = ROOT / "examples"
    told = re.sub(r"\]\((\w+)\.py\)", r"](#\1)", (folder / "README.md").read_text(encoding="utf-8"))
    scripts = [(path.name, path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.py"))]
    return "\n\n".join(
        [told, *(f"## {name.replace('_', chr(92) + '_')} {{ #{stem} }}\n\n```python\n{text}```" for name, stem, text in scripts)]
    )


def _paragraph(paragraph: str) -> Iterator[str]:
    lines = paragraph.split("\n")
    if all(line.startswith("    ") for line in lines):
        yield "\n".join(["```text", *(line[4:] for line in lines), "```"])
    elif re.match(r"\d+\. ", lines[0]):
        # a line that does not begin a point goes on with the one before
        yield _inline("\n".join(lines)).replace("\n   ", " ")
    else:
        yield from _said(" ".join(lines))


def _said(text: str) -> Iterator[str]:
    """A paragraph, cut where the docstring says whose the next sentences are."""
    begins = [*_LABEL.finditer(text)]
    ends = [*(match.start() for match in begins), len(text)][1:]
    if not begins or begins[0].start():
        yield _inline(text[: begins[0].start()] if begins else text)
    for match, end in zip(begins, ends, strict=True):
        whose, more = match[1], match[2]
        words = text[match.start() if more else match.end() : end]
        yield f'<span class="whose">{whose}</span> {_inline(words[:1].upper() + words[1:])}\n{{: .said .said-{whose.lower()} }}'


def _inline(text: str) -> str:
    """Markdown of one line of plain text."""
    parts = re.split(r"(`[^`\n]+`)", text)
    made = "".join(part if part.startswith("`") else re.sub(r"[<>|\\*_\[\]#]", lambda found: _SPECIAL[found[0]], part) for part in parts)
    marked = re.sub(r"\\\[(published|reconstruction|ours)\\\]", r'<span class="mark">\1</span>', made)
    return re.sub(r"\b(\d{4}\.\d{5})\b", r"[\1](https://arxiv.org/abs/\1)", marked).strip()


def _facts(method: Method) -> str:
    told = {"follows": method.mark, "works": method.place, "file": f"<code>{method.file}</code>"}
    return '<p class="facts">' + "".join(f"<span><b>{name}</b> {value}</span>" for name, value in told.items() if value) + "</p>"


def _plugin(family: Family, method: Method) -> Iterator[str]:
    """What belongs to a method that is asked for by its name."""
    (public,) = method.public
    yield f"## Knobs\n\n{prose(public.text)}"
    if public.fields:
        knob = next(iter(public.fields))
        yield _fields("knob", public.fields)
        name = f"{method.name}:{family.amount}," if family.amount else f"{method.name}:"
        yield f"Written behind the name: `{name}{knob.name}={knob.default.strip(chr(39)) or '...'}`."
    elif "no knobs" not in public.text:
        yield "It has none."
    use, shell = (text.format(family.asked(method.name)) for text in (family.use, family.shell))
    if use or shell:
        yield "## Use"
    if shell:
        yield f"```bash\n{shell}\n```"
    if use:
        yield f"```python\n{use}\n```"


def _exports(method: Method) -> Iterator[str]:
    """What a file offers to Python."""
    top, _, rest = method.file.removesuffix(".py").partition("/")
    module = f"{IMPORTS.get(top, top)}.{rest.replace('/', '.')}"
    names = ", ".join(public.name for public in method.public)
    yield f"## In Python\n\n```python\nfrom {module} import {names}\n```"
    for public in method.public:
        yield _public(public)


def _public(public: Public) -> str:
    parts = [f"### {public.name}".replace("_", r"\_"), f"```python\n{public.call}\n```" if public.call else "", prose(public.text)]
    return "\n\n".join(part for part in [*parts, _fields("field", public.fields) if public.fields else ""] if part)


def _fields(what: str, fields: Sequence[Field]) -> str:
    rows = [{what: _code(field.name), "type": _code(field.kind), "default": _code(field.default)} for field in fields]
    return table(rows)


def _code(text: str) -> str:
    return f"<code>{re.sub('[<>|]', lambda found: _SPECIAL[found[0]], text)}</code>" if text else ""


def kept_result(name: str) -> dict[str, Any] | None:
    """The result of a bench that the repository keeps, if there is one."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def where(result: Mapping[str, Any]) -> str:
    """What a result was measured with, in one line."""
    hardware, versions = result["hardware"], result["versions"]
    machine = [hardware["cpu"], hardware.get("gpu", ""), f"{hardware['cores']} cores, {hardware['memory_gb']} GB"]
    code = [f"{name} {versions[name]}" for name in ("commit", "torch", "transformers") if versions.get(name)]
    return f"`{result['command']}` on {', '.join(part for part in [*machine, *code] if part)}\n{{: .where }}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of a result; one of more columns than a page is wide and of few rows is turned, a line for each of its columns."""
    told = [{name: _cell(value) for name, value in row.items()} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    words = [name for name in names if all(isinstance(row.get(name), str) for row in rows)]
    heads = [" ".join(row[name] for name in words) for row in told]
    if len(names) < WIDE or len(rows) > FEW or len({*heads}) < len(rows):
        return table(told)
    lines = [
        {"": name.replace("_", " "), **{head: row.get(name, "") for head, row in zip(heads, told, strict=True)}}
        for name in names
        if name not in words
    ]
    return table(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _inline(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """A table; a column in which only numbers stand is set to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    right = {name: all(re.fullmatch(r"[-\d.,e+]*", row.get(name, "")) for row in rows) for name in names}
    lines = [names, ["---:" if right[name] else "---" for name in names], *[[row.get(name, "") for name in names] for row in rows]]
    lines[0] = [name.replace("_", " ") for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
