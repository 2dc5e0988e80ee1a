"""A picture of what the model looked at: the encoder's attention as heat, dropped patches dimmed, merged ones outlined.

One row per input; an image is drawn beside itself, a clip as its frames from left to right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from mmsdk.answer import Sight
from mmsdk.errors import InputError
from mmsdk.tokencomp.audit import owners
from mmsdk.vision.types import Image, Media
from mmsdk.vision.values import cause

__all__ = ["draw", "panels", "save"]

SIDE = 336  # pixels of a panel's longer side
GAP = 8
LINE = 24
BOLD = 1  # pixels that bold letters are wider
QUESTION = "#1d4f91"
FRAMES = 8  # a clip shows at most so many of its steps
HEAT, DIM = 0.45, 0.25
THIN = 24  # pixels that a panel's shorter side has at least: a strip is drawn thicker than it is
BRIGHT = 170  # above it a border is black, below it white

Panel = UInt8[np.ndarray, "H W 3"]
Font = PIL.ImageFont.FreeTypeFont | PIL.ImageFont.ImageFont


def draw(media: Sequence[Media], sights: Sequence[Sight], question: str = "", answer: str = "") -> PIL.Image.Image:
    """The picture for one answer: `sights[i]` tells how `media[i]` was looked at; above stands the question, in colour, then the answer."""
    rows = [_row(item, sight) for item, sight in zip(media, sights, strict=True)]
    font = PIL.ImageFont.load_default(size=LINE * 2 // 3)
    width = max([GAP + sum(panel.shape[1] + GAP for panel in row) for row in rows] + [SIDE])
    asked, answered = (_wrapped(text, font, width - 2 * GAP - BOLD) for text in (question, answer))
    accounts = [_wrapped(_account(sight), font, width - 2 * GAP) for sight in sights]
    texts = (len(asked) + len(answered) + sum(map(len, accounts))) * LINE + (GAP if asked or answered else 0)
    page = PIL.Image.new("RGB", (width, GAP + texts + sum(_height(row) + GAP for row in rows)), "white")
    pen = _Pen(PIL.ImageDraw.Draw(page), font)
    top = pen.write(asked, GAP, QUESTION, bold=True)
    top = pen.write(answered, top, "black")
    top += GAP if asked or answered else 0
    for row, account in zip(rows, accounts, strict=True):
        left = GAP
        for panel in row:
            page.paste(PIL.Image.fromarray(panel), (left, top))
            left += panel.shape[1] + GAP
        top = pen.write(account, top + _height(row), "dimgray") + GAP
    return page


def panels(item: Media, sight: Sight, side: int = SIDE, glow: float = HEAT) -> list[PIL.Image.Image]:
    """What was looked at, drawn on the picture or on some frames of the clip, `side` pixels long; `glow` is the share of heat."""
    return [PIL.Image.fromarray(panel) for panel in _looks(item, sight, side, glow)]


def save(page: PIL.Image.Image, path: Path) -> None:
    """Write a drawn picture; InputError where that fails, as for a format that holds no picture of this size."""
    try:
        page.save(path)
    except (OSError, ValueError) as error:
        raise InputError(f"a picture of {page.width}x{page.height} cannot be written there: {cause(error)}", item=str(path)) from error


def _row(item: Media, sight: Sight) -> list[Panel]:
    if isinstance(item, Image):
        return [_fitted(item.pixels), *_looks(item, sight, SIDE, HEAT)]
    return _looks(item, sight, SIDE // 2, HEAT)


def _looks(item: Media, sight: Sight, side: int, glow: float) -> list[Panel]:
    cells = owners(sight.audit, sight.positions, sight.grid)
    heat = _heat(sight)
    if isinstance(item, Image):
        return [_looked_at(_fitted(item.pixels, side), heat[0], cells[0], glow)]
    steps = np.linspace(0, sight.grid[0] - 1, min(FRAMES, sight.grid[0])).round().astype(int).tolist()
    frames = [_fitted(item.frames[step * len(item.frames) // sight.grid[0]], side) for step in steps]
    return [_looked_at(frame, heat[step], cells[step], glow) for frame, step in zip(frames, steps, strict=True)]


def _heat(sight: Sight) -> Float[Tensor, "t h w"]:
    """Saliency on the grid, scaled to [0, 1] over the input; flat where the encoder offers none."""
    heat = torch.zeros(sight.grid)
    if sight.saliency.shape[0] == 0:
        return heat
    values = sight.saliency.float().cpu()
    # attention gathers on a few patches; scaled to the very highest, all others would look alike
    low, high = values.min(), values.quantile(0.98)
    heat[tuple(sight.positions.cpu().unbind(dim=1))] = ((values - low) / (high - low).clamp_min(1e-12)).clamp(max=1.0)
    return heat


def _fitted(pixels: UInt8[Tensor, "3 h w"], side: int = SIDE) -> Panel:
    height, width = pixels.shape[1:]
    scale = side / max(height, width)
    size = max(THIN, round(width * scale)), max(THIN, round(height * scale))
    way = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    fitted: Panel = cv2.resize(pixels.permute(1, 2, 0).contiguous().numpy(), size, interpolation=way)
    return fitted


def _looked_at(picture: Panel, heat: Float[Tensor, "h w"], cells: Int[Tensor, "h w"], glow: float) -> Panel:
    height, width = picture.shape[:2]
    smooth = cv2.resize(heat.numpy(), (width, height), interpolation=cv2.INTER_CUBIC).clip(0, 1)
    colours = cv2.applyColorMap((smooth * 255).astype(np.uint8), cv2.COLORMAP_INFERNO)[..., ::-1]
    owner = cv2.resize(cells.cpu().numpy().astype(np.int32), (width, height), interpolation=cv2.INTER_NEAREST)
    share = glow * smooth[..., None]
    mixed = picture * (1 - share) + colours * share
    mixed[owner < 0] *= DIM
    if len(cells.unique()) < cells.numel():
        borders = _borders(owner)
        mixed[borders] = np.where(mixed[borders].mean(-1, keepdims=True) > BRIGHT, 0, 255)
    drawn: Panel = mixed.round().clip(0, 255).astype(np.uint8)
    return drawn


def _borders(owner: Int[np.ndarray, "h w"]) -> np.ndarray:
    """True on the first pixel after a change of owner, to the right or below."""
    edge = np.zeros(owner.shape, dtype=bool)
    edge[:, 1:] |= owner[:, 1:] != owner[:, :-1]
    edge[1:, :] |= owner[1:, :] != owner[:-1, :]
    return edge


def _account(sight: Sight) -> str:
    kept = int(sight.audit.assignment.max()) + 1
    source = sight.source.rsplit("/", 1)[-1][-40:]
    return f"{source}: {kept} of {len(sight.positions)} tokens kept ({sight.audit.method})"


def _height(row: Sequence[Panel]) -> int:
    return max(len(panel) for panel in row)


@dataclass(frozen=True, slots=True)
class _Pen:
    page: PIL.ImageDraw.ImageDraw
    font: Font

    def write(self, lines: Sequence[str], top: int, colour: str, bold: bool = False) -> int:
        """Lines of text from `top` downwards; where the next one would begin."""
        for number, line in enumerate(lines):
            # the font has no bold face: the same letters once more, a little to the right
            for shift in range(1 + BOLD * bold):
                self.page.text((GAP + shift, top + number * LINE), line, fill=colour, font=self.font)
        return top + len(lines) * LINE


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    """Lines no longer than `width` pixels, broken between words, and within a word that is longer than a line."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            if font.getlength(f"{line} {word}".lstrip()) <= width:
                line = f"{line} {word}".lstrip()
                continue
            *full, last = _cut(word, font, width)
            lines += [line, *full] if line else full
            line = last
        lines += [line] if line else []
    return lines


def _cut(word: str, font: Font, width: int) -> list[str]:
    parts = [""]
    for letter in word:
        if parts[-1] and font.getlength(parts[-1] + letter) > width:
            parts.append("")
        parts[-1] += letter
    return parts
