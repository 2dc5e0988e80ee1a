"""Video diffusion models by their files: one for each family, and `load`, which takes the family from a folder's settings."""

from mmsdk.diffusion.models.load import load

__all__ = ["load"]
