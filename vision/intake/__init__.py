"""Intake: pictures and clips in whatever form they come, as upright RGB pixels, or an InputError that names what is wrong with which."""

from mmsdk.vision.intake.access import Access
from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.load import Frames, Source, check, load, load_all, load_image, load_video
from mmsdk.vision.sampling import Sampling

__all__ = ["Access", "Frames", "Limits", "Sampling", "Source", "check", "load", "load_all", "load_image", "load_video"]
