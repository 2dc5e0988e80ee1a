"""Sparse attention in a diffusers pipeline by one line, and out of it again: `sparsify(pipe, "svg2")`.

Hooks on the transformer and on its self-attentions tell the grid, the step and the layer; while one of them runs, its call of torch's
fused attention is answered by a session. No class of diffusers is changed and none is imported: what is not touched, cross-attention above
all, stays as it was. Works with the native attention backend, diffusers' own default.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mmsdk import plugins
from mmsdk.diffusion.attention.session import Session
from mmsdk.diffusion.attention.types import Grid, Place, Selector
from mmsdk.diffusion.attention.wave_align import WaveAlign
from mmsdk.errors import InputError, ModelError, PluginError

__all__ = ["METHODS", "Sparsified", "selector", "sparsify"]

METHODS = "mmsdk.diffusion.attention.methods"


@runtime_checkable
class _Pipeline(Protocol):
    """What is asked of a pipeline: its parts by name."""

    @property
    def components(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """A self-attention, and the weight that its heads' outputs go through, wherever the model keeps that."""

    attention: torch.nn.Module
    projection: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class _Family:
    """The self-attentions of a transformer, in the order in which they run, and how its arguments tell the grid and the time.

    The time falls from step to step.
    """

    layers: Callable[[Any], list[_Layer]]
    grid: Callable[[Any, Mapping[str, Any]], Grid]
    time: Callable[[Mapping[str, Any]], float] = lambda given: float(torch.as_tensor(given["timestep"]).flatten()[0])


def sparsify(pipe: _Pipeline | torch.nn.Module, method: str | Selector, steps: int = 50, align: WaveAlign | None = None) -> "Sparsified":
    """Put sparse attention into a pipeline of diffusers, or into a transformer of one.

    `method` is a file of `mmsdk.diffusion.attention.methods`, with its knobs ("nabla:mass=0.8"), or an object. `steps` counts those of a
    generation where no scheduler tells. `.remove()` takes it out again. Raises ModelError for a transformer of another family, PluginError
    for an unknown method.
    """
    if isinstance(pipe, torch.nn.Module):
        transformers, scheduler = [pipe], None
    else:
        parts = pipe.components
        transformers = [part for name, part in parts.items() if name.startswith("transformer") and part is not None]
        scheduler = parts.get("scheduler")
    if not transformers:
        raise ModelError("the pipeline has no transformer to put sparse attention into")
    chosen = selector(method)
    return Sparsified([_Attached(part, chosen, scheduler, steps, align) for part in transformers])


def selector(method: str | Selector) -> Selector:
    """A method by name, with its knobs; a bare value is that of its first share ("svg2:0.8" is its mass). Raises PluginError for none."""
    if not isinstance(method, str):
        built: object = method
    else:
        spec = plugins.parse(method)
        plugins.check(METHODS, spec.name)
        if spec.amount:
            shares = [name for name, default in plugins.knobs(METHODS, spec.name).items() if "." in default]
            if not shares:
                raise PluginError(f"{method!r}: {spec.name!r} has no share to set; write its knobs as knob=value")
            spec = plugins.Spec(spec.name, "", ((shares[0], spec.amount), *spec.knobs))
        built = plugins.build(METHODS, spec)
    if not isinstance(built, Selector):
        raise PluginError(f"{method!r} is no method of sparse attention: it cannot be called")
    return built


class Sparsified:
    """What `sparsify` put in; as a context manager it takes itself out at the end."""

    def __init__(self, attached: list["_Attached"]) -> None:
        self._attached = attached

    @property
    def calls(self) -> int:
        """How many attentions have been answered so far."""
        return sum(one.calls for one in self._attached)

    def reset(self) -> None:
        """Forget what was kept from step to step, as the beginning of a generation does by itself."""
        for one in self._attached:
            one.reset()

    def remove(self) -> None:
        """Take all hooks out: the pipeline is what it was."""
        for one in self._attached:
            one.remove()

    def __enter__(self) -> "Sparsified":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Attached:
    """The hooks of one transformer, and where its generation stands.

    A step is a run of calls with one timestep, each call of it a branch of the guidance; a timestep above the last one begins anew.
    """

    def __init__(self, model: Any, selector: Selector, scheduler: Any, steps: int, align: WaveAlign | None) -> None:
        name = type(model).__name__
        if name not in _FAMILIES:
            raise ModelError(f"{name} is of no family that sparse attention is known for: {', '.join(_FAMILIES)}")
        self._family, self._scheduler, self._steps = _FAMILIES[name], scheduler, steps
        self._session = Session(selector, align)
        self._signature = inspect.signature(model.forward)
        self._grid = Grid(1, 1, 1)
        self._timestep, self._step, self._branch = float("inf"), 0, 0
        layers = self._family.layers(model)
        self._modes = [_Answering(self, layer.projection, number) for number, layer in enumerate(layers)]
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for layer, mode in zip(layers, self._modes, strict=True):
            self._hooks += [
                layer.attention.register_forward_pre_hook(mode.begin),
                layer.attention.register_forward_hook(mode.end, always_call=True),
            ]

    @property
    def calls(self) -> int:
        return sum(mode.calls for mode in self._modes)

    def reset(self) -> None:
        self._session.reset()
        self._timestep, self._step, self._branch = float("inf"), 0, 0

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind(*args, **kwargs).arguments
        self._grid = self._family.grid(model, given)
        timestep = self._family.time(given)
        if timestep == self._timestep:
            self._branch += 1
            return
        if timestep > self._timestep:
            self.reset()
        self._step, self._branch = (0 if self._timestep == float("inf") else self._step + 1), 0
        self._timestep = timestep

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, mode: "_Answering") -> Tensor:
        """The attention of one layer; tokens at the end that the mask hides from all are left out, and get 0."""
        grid = self._grid
        if query.shape[2] != grid.tokens:
            raise InputError(f"layer {mode.layer} attends over {query.shape[2]} tokens; video and text make {grid.tokens}", item="grid")
        kept = grid.tokens if mask is None else _reach(mask, grid)
        shorter = Grid(grid.frames, grid.height, grid.width, grid.before, grid.after - (grid.tokens - kept))
        steps = self._steps if self._scheduler is None else len(self._scheduler.timesteps)
        projection = mode.projection().unflatten(1, (query.shape[1], -1)).transpose(0, 1)
        place = Place(shorter, self._step, steps, mode.layer, len(self._modes), projection=projection)
        out = self._session(query[:, :, :kept], keys[:, :, :kept], values[:, :, :kept], place, str(self._branch))
        return F.pad(out, (0, 0, 0, grid.tokens - kept))


class _Answering(TorchFunctionMode):
    """While it is on, torch's fused attention is answered by the session, and everything else goes on as it is."""

    def __init__(self, attached: _Attached, projection: Callable[[], Tensor], layer: int) -> None:
        super().__init__()
        self._attached, self.projection, self.layer = attached, projection, layer
        self.calls = 0
        self._on = ExitStack()

    def begin(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._on.enter_context(self)

    def end(self, module: torch.nn.Module, args: tuple[Any, ...], out: object) -> None:
        self._on.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        self.calls += 1
        return self._attached.attend(given["query"], given["key"], given["value"], given.get("attn_mask"), self)


def _reach(mask: Bool[Tensor, "*b n"], grid: Grid) -> int:
    """How many tokens a mask of padding leaves, all of them at the front and as many in each row of the batch."""
    if mask.dtype != torch.bool:
        raise InputError("sparse attention takes a mask of true and false, not one that is added to the scores", item="attention_mask")
    rows = mask.flatten(0, -2).unique(dim=0)
    reach = int(rows[0].sum())
    ordered = torch.arange(grid.tokens, device=mask.device) < reach
    if len(rows) > 1 or not bool((rows[0] == ordered).all()) or reach < grid.before + grid.video:
        raise InputError("sparse attention takes padding at the end of the text, as much in every row", item="attention_mask")
    return reach


def _patched(model: Any, given: Mapping[str, Any], frames: int, patch: tuple[int, int, int], before: int = 0, after: int = 0) -> Grid:
    """The grid of latents whose frames are axis `frames`, height and width the last two."""
    shape = given["hidden_states"].shape
    return Grid(shape[frames] // patch[0], shape[-2] // patch[1], shape[-1] // patch[2], before, after)


def _wan(model: Any, given: Mapping[str, Any]) -> Grid:
    return _patched(model, given, 2, model.config.patch_size)


def _ltx(model: Any, given: Mapping[str, Any]) -> Grid:
    return Grid(given["num_frames"], given["height"], given["width"])


def _cogvideox(model: Any, given: Mapping[str, Any]) -> Grid:
    size, frames = model.config.patch_size, model.config.patch_size_t or 1
    return _patched(model, given, 1, (frames, size, size), before=given["encoder_hidden_states"].shape[1])


def _hunyuan(model: Any, given: Mapping[str, Any]) -> Grid:
    size, frames = model.config.patch_size, model.config.patch_size_t
    return _patched(model, given, 2, (frames, size, size), after=given["encoder_hidden_states"].shape[1])


def _minimax(model: Any, given: Mapping[str, Any]) -> Grid:
    """The frames that are made stand last in one packed sequence; text, sound and frames that are given stand before them, and stay dense.

    A row's places tell its frame, row and column. Raises InputError where the last rows are no whole frames in order.
    """
    times, places = given["timestep_indices"], given["position_ids"]
    other = (given["token_tags"] != given["token_tags"][-1]) | (times != times[-1])
    before = int(other.nonzero()[-1]) + 1 if bool(other.any()) else 0
    video = places[before:]
    frames = torch.unique_consecutive(video[:, 0]).numel()
    height = torch.unique_consecutive(video[: len(video) // frames, 1]).numel()
    grid = Grid(frames, height, len(video) // (frames * height), before=before)
    whole = video[:, 1:].unflatten(0, (grid.frames, -1)) if grid.tokens == len(places) else video[:0, None]
    if not len(whole) or not bool((whole == whole[:1]).all()):
        raise InputError(
            "sparse attention takes the frames that are made as the last rows, frame by frame, row by row", item="position_ids"
        )
    return grid


def _minimax_time(given: Mapping[str, Any]) -> float:
    """Of the rows that are made; 1 is clean there."""
    return -float(given["timestep"][given["timestep_indices"][-1]])


def _own(attention: Any) -> _Layer:
    return _Layer(attention, lambda: attention.to_out[0].weight)


def _joint(block: Any) -> _Layer:
    """A block that projects the attention's output and its own hidden layer together, the attention's first."""
    return _Layer(block.attn, lambda: block.proj_out.weight[:, : block.attn.inner_dim])


_FAMILIES = {
    "WanTransformer3DModel": _Family(lambda model: [_own(block.attn1) for block in model.blocks], _wan),
    "LTXVideoTransformer3DModel": _Family(lambda model: [_own(block.attn1) for block in model.transformer_blocks], _ltx),
    "CogVideoXTransformer3DModel": _Family(lambda model: [_own(block.attn1) for block in model.transformer_blocks], _cogvideox),
    "HunyuanVideoTransformer3DModel": _Family(
        lambda model: [
            *(_own(block.attn) for block in model.transformer_blocks),
            *(_joint(block) for block in model.single_transformer_blocks),
        ],
        _hunyuan,
    ),
    "MiniMaxH3Transformer3DModel": _Family(lambda model: [_own(block.attn) for block in model.transformer_blocks], _minimax, _minimax_time),
}
