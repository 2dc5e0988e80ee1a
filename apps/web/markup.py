"""The pieces of HTML that the tabs are drawn with; how they look is `style.css`. Whatever comes from outside is escaped here."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

import PIL.Image

__all__ = ["Fact", "Segment", "bar", "card", "facts", "number", "picture", "status"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that is told: what it is, the value, and what stands small behind it."""

    name: str
    value: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar: what it is, how long, and the words that say how long."""

    name: str
    size: float
    told: str = ""


def status(text: str = "", busy: bool = False) -> str:
    """One quiet line: what is being done, or how it ended; nothing without words."""
    if not text:
        return '<div class="mm-status" role="status"></div>'
    return f'<div class="mm-status{" mm-busy" * busy}" role="status"><i></i>{html.escape(text)}</div>'


def card(title: str, tag: str, text: str, below: str = "", writing: bool = False, chosen: bool = False) -> str:
    """An answer: which it is, its words, and what is known about it. `writing` shows that words still come."""
    caret = '<span class="mm-caret"></span>' if writing else ""
    body = html.escape(text) + caret if text or writing else '<span class="mm-empty">no answer yet</span>'
    head = f"<header><h3>{html.escape(title)}</h3><span>{html.escape(tag)}</span></header>"
    return f'<article class="mm-card{" mm-chosen" * chosen}">{head}<p class="mm-answer">{body}</p>{below}</article>'


def facts(items: Sequence[Fact]) -> str:
    """Numbers side by side."""
    cells = [
        f"<div><dt>{html.escape(fact.name)}</dt><dd>{html.escape(fact.value)}<small>{html.escape(fact.beside)}</small></dd></div>"
        for fact in items
    ]
    return f'<dl class="mm-facts">{"".join(cells)}</dl>'


def bar(segments: Sequence[Segment], whole: float) -> str:
    """A bar of parts, as long as they are together of `whole`, and their names below."""
    drawn = [
        f'<i class="mm-part{place}" style="width:{100 * part.size / max(whole, 1e-9):.2f}%" title="{html.escape(part.name)}"></i>'
        for place, part in enumerate(segments)
    ]
    names = [
        f'<span><i class="mm-part{place}"></i>{html.escape(part.name)} <b>{html.escape(part.told)}</b></span>'
        for place, part in enumerate(segments)
    ]
    return f'<div class="mm-bar">{"".join(drawn)}</div><div class="mm-names">{"".join(names)}</div>'


def picture(image: PIL.Image.Image, alt: str, quality: int = 88) -> str:
    """A picture inside of the page; small ones exactly, large ones as JPEG."""
    file = io.BytesIO()
    small = image.width * image.height <= 96 * 96
    image.save(file, "PNG" if small else "JPEG", **({} if small else {"quality": quality}))
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/{"png" if small else "jpeg"};base64,{data}">'


def number(value: int | float) -> str:
    """A number as it is read most easily: three figures, thousands apart."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
