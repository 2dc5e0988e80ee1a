"""Video diffusion: sparse attention for any diffusion transformer, `sparsify(pipe, "svg2")`."""

from mmsdk.diffusion.adapter import Sparsified, sparsify

__all__ = ["Sparsified", "sparsify"]
