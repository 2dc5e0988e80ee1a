"""Intake: pictures and clips in whatever form they come, as upright RGB pixels, or an InputError that names what is wrong with which."""

from mmsdk.vision.intake.limits import Limits
from mmsdk.vision.intake.load import Frames, Picture, Source, load, load_all, load_image, load_video
from mmsdk.vision.intake.url import Web
from mmsdk.vision.sampling import Sampling

__all__ = ["Frames", "Limits", "Picture", "Sampling", "Source", "Web", "load", "load_all", "load_image", "load_video"]
