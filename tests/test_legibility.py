"""What is left of each input is measured, and PP-13: a page of small text is never silently answered from too few tokens."""

from dataclasses import asdict, replace

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pytest
import torch

from mmsdk.answer import Sight
from mmsdk.compress import compression
from mmsdk.encoded import Encoded
from mmsdk.legibility import LegibilityWarning, guarded
from mmsdk.seeing import Seen
from mmsdk.tokencomp.audit import compose
from mmsdk.tokencomp.fidelity import Fidelity, fidelity
from mmsdk.tokencomp.plan import untouched
from mmsdk.vision.types import Image, Media, Video, VisualTokens


def page() -> Image:
    picture = PIL.Image.new("RGB", (448, 448), "white")
    pen, font = PIL.ImageDraw.Draw(picture), PIL.ImageFont.load_default(size=11)
    for top in range(8, 430, 16):
        pen.text((8, top), "all rights reserved; no part of this page may be read without enough tokens " * 2, font=font, fill="black")
    return Image(torch.from_numpy(np.array(picture)).permute(2, 0, 1), "page.png")


def noise() -> Image:
    return Image(torch.randint(0, 256, (3, 448, 448), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)), "noise.png")


def seen(media: Media) -> Seen:
    """Tokens of an encoder for which every patch is like no other."""
    features = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(16), torch.arange(16))
    tokens = VisualTokens(features, positions, torch.ones(256), (1, 16, 16), torch.zeros(1), torch.rand(256))
    return Seen(256, tokens, Sight(media.source, tokens.grid, tokens.positions, tokens.saliency, untouched(tokens).audit, media.notes))


def left(item: Seen, spec: str) -> Sight:
    (compressed,) = compression(spec)([item.tokens])
    return replace(item.sight, audit=compose(item.sight.audit, compressed.audit))


def guard(media: Media | Encoded, item: Seen, spec: str) -> Sight:
    (sight,) = guarded([media], [item], [left(item, spec)])
    return sight


@pytest.mark.parametrize("spec", ["uniform:0.1", "random:25", "simplecluster:0.1"])
def test_a_starved_page_is_warned_of_with_the_measured_coverage(spec: str) -> None:
    """PP-13: with independent patches a tenth of them covers itself, and groups of ten cover next to nothing."""
    with pytest.warns(LegibilityWarning, match=r"page\.png: this picture is full of writing"):
        (note,) = guard(page(), seen(page()), spec).notes
    share = int(note.split("%")[0].split()[-1])
    kept = 26 if "0.1" in spec else 25
    assert f"{kept} of its 256 visual tokens cover" in note
    assert share < 30 if spec.startswith("simple") else share == 10


@pytest.mark.parametrize("spec", ["identity", "uniform:1.0", "uniform:0.6"])
def test_a_page_with_tokens_enough_is_not(spec: str) -> None:
    assert guard(page(), seen(page()), spec).notes == ()


@pytest.mark.parametrize("spec", ["uniform:0.1", "simplecluster:0.1", "evs:0.3"])
def test_every_answer_tells_how_much_of_the_tokens_is_left(spec: str) -> None:
    """By the measures' own definition, of a picture as of a clip, in a batch of both."""
    item = seen(noise())
    (compressed,) = compression(spec)([item.tokens])
    for sight in guarded([noise(), Video(page().pixels[None], torch.zeros(1))], [item] * 2, [left(item, spec)] * 2):
        assert sight.fidelity is not None
        assert asdict(sight.fidelity) == pytest.approx(asdict(fidelity(item.tokens, compressed)), abs=1e-6)
        assert sight.fidelity.nqe > 0.5 and sight.fidelity.coverage < 0.5
    for whole in ("identity", "uniform:1.0"):
        assert guard(noise(), item, whole).fidelity == Fidelity(0.0, 1.0, 1.0)


def test_pictures_without_writing_and_clips_are_not() -> None:
    item = seen(noise())
    assert guard(noise(), item, "uniform:0.1").notes == ()
    assert guard(Video(page().pixels[None], torch.zeros(1)), item, "uniform:0.1").notes == ()


def test_patches_that_are_alike_are_covered_by_a_few() -> None:
    item = seen(page())
    alike = replace(item, tokens=replace(item.tokens, features=item.tokens.features[:1] + 0.01 * item.tokens.features))
    assert guard(page(), alike, "uniform:0.1").notes == ()
    # ... of which there must be some
    with pytest.warns(LegibilityWarning, match="25 of its 256 visual tokens are kept"):
        assert len(guard(page(), alike, "uniform:25").notes) == 1


def test_what_was_encoded_before_is_guarded_too() -> None:
    item = seen(page())
    for media, expected in ((page(), 1), (noise(), 0)):
        encoded = Encoded.of(media, item.tokens, "small")
        if expected:
            with pytest.warns(LegibilityWarning):
                assert len(guard(encoded, item, "uniform:0.1").notes) == 1
        else:
            assert guard(encoded, item, "uniform:0.1").notes == ()


def test_a_shortened_encoder_has_nothing_to_compare_with_and_is_judged_by_its_count() -> None:
    """256 patches that the encoder itself made 32, or 128."""
    item = seen(page())
    for count, starved in ((32, True), (128, False)):
        (short,) = compression(f"simplecluster:{count}")([item.tokens])
        inside = Seen(256, short.tokens, replace(item.sight, audit=short.audit))
        if starved:
            with pytest.warns(LegibilityWarning, match="32 of its 256 visual tokens are kept"):
                guarded([page()], [inside], [inside.sight])
        else:
            (sight,) = guarded([page()], [inside], [inside.sight])
            assert sight.notes == () and sight.fidelity is None
