"""Intake: pictures and clips in whatever form they come, as upright RGB pixels, or an InputError that names what is wrong with which."""

from mmsdk.vision.intake.access import Access, Ways
from mmsdk.vision.intake.image import ANIMATED
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.load import Frames, Source, check, load, load_all, load_image, load_video
from mmsdk.vision.sampling import Sampling

__all__ = [
    "ANIMATED",
    "Access",
    "Frames",
    "Limits",
    "Sampling",
    "Source",
    "Ways",
    "check",
    "load",
    "load_all",
    "load_image",
    "load_video",
]
