"""The pipeline: media and a question in, an answer out, by way of load, encode, compress, prefill and decode, each timed.

Two other tasks are behind the same door: clips of texts (`mmsdk.diffusion.filming`) and worlds (`mmsdk.diffusion.world.door`).

pipe = pipeline("image-text-to-text")
answer = pipe("photo.jpg", "What is on the table?")
for piece in pipe.stream("clip.mp4", "What happens?"): print(piece, end="")
answers = pipe([("a.jpg", "Which colour?"), ("b.png", "How many?")])
photo = pipe.encode("photo.jpg")  # asked about again and again, encoded once
chat = pipe.chat()  # each question knows those before it
"""

import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NoReturn, cast, overload

import torch

from mmsdk.adapters import Adapters, AdapterSpec, Worn
from mmsdk.answer import Answer
from mmsdk.answering import Stream, alone, answered, checked, sampled, streamed
from mmsdk.chat import Chat
from mmsdk.compress import Compression, CompressionSpec, compression
from mmsdk.device import find_device
from mmsdk.diffusion.filming import VideoGeneration, open_maker
from mmsdk.diffusion.world.door import World, open_world, paging
from mmsdk.diffusion.world.memory import Paging
from mmsdk.doors import door
from mmsdk.encoded import Encoded, Given
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.families import open_model
from mmsdk.generate.config import EarlyStopping, GenerationConfig, Stop, stops
from mmsdk.generate.constrain import Constraint, Schema
from mmsdk.kv.memory import PagedMemory, RoundedMemory
from mmsdk.kv.policy_memory import PolicyMemory
from mmsdk.models.types import VLM
from mmsdk.precision import resolve_dtype, resolve_quantize
from mmsdk.reading import Question, pairs_of, refuse_messages, refuse_pairs
from mmsdk.recall import Recall, recalling
from mmsdk.stages import Context
from mmsdk.stream import StreamSession
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.intake import Source, load
from mmsdk.vision.values import shown, whole
from mmsdk.watch import Watch, holding
from mmsdk.weights.fetch import quiet, while_it_lasts

__all__ = ["Answer", "Context", "Pipeline", "Stream", "find_device", "pipeline"]

TASKS = ("image-text-to-text", "video-generation", "world-model")


@overload
def pipeline(
    task: Literal["video-generation"], model: str | os.PathLike[str] = ..., *, dtype: str | torch.dtype | None = ...,
    device: str | torch.device | None = ..., progress: bool = ...,
) -> VideoGeneration: ...  # fmt: skip


@overload
def pipeline(
    task: Literal["world-model"], model: str | os.PathLike[str] = ..., *, dtype: str | torch.dtype | None = ...,
    device: str | torch.device | None = ..., kv: str | None = ..., progress: bool = ...,
) -> World: ...  # fmt: skip


@overload
def pipeline(
    task: Literal["image-text-to-text"] = ..., model: str | os.PathLike[str] = ..., *, compress: CompressionSpec | None = ...,
    dtype: str | torch.dtype | None = ..., device: str | torch.device | None = ..., batch_size: int = ..., quantize: str | None = ...,
    kv: str | None = ..., gguf_file: str | os.PathLike[str] | None = ..., progress: bool = ...,
) -> "Pipeline": ...  # fmt: skip


@door
def pipeline(
    task: str = "image-text-to-text",
    model: str | os.PathLike[str] = "mini",
    *,
    compress: CompressionSpec | None = "identity",
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = "cpu",
    batch_size: int = 16,
    quantize: str | None = "none",
    kv: str | None = "dense",
    gguf_file: str | os.PathLike[str] | None = "",
    progress: bool = True,
) -> "Pipeline | VideoGeneration | World":
    """Put a model's parts together, ready to answer; of the task "video-generation" ready to make clips, of "world-model" frame by frame.

    These two take a folder, `dtype`, `device` and `progress`, a bar of the steps of clips where a world's frames show none, and a world
    its memory as `kv` ("pages:recalled=8", "window:8").

    `model` is "mini", a folder, "org/name", or the GGUF file of a language model alone; `compress` says what the compress stage keeps
    ("uniform:64"); `dtype` "auto" is bfloat16 where the device computes in it natively, else float32; `batch_size` is how many rows of a
    batch run together; `quantize` "int4" or "int8" stores the language model's matrices in fewer bits (a GPU needs Triton for it); `kv`
    "paged" keeps what the decoder knows in blocks, and pictures as they were encoded, so that a later question about the same picture
    begins where the earlier one did, and "int8", "int4", "int2" or "fp8" keeps all but the last tokens in fewer bits, which may change
    answers; so may a policy with what it keeps of the prompt, "snapkv:0.25" or "h2o:512" (docs/memory.md).
    `gguf_file` is a file, in the folder or anywhere, that the language model is read from in the place of the folder's own. While a folder
    is read a bar says how far, on stderr where that is a terminal, unless `progress` is off. None in the place of a name is its default.
    Raises ModelError for a task, model or precision that is not supported, WeightsError where weights cannot be had, PluginError or
    BudgetError for a compression or a memory that cannot be, InputError for a batch size below 1 and a device that this machine does not
    have.
    """
    if task not in TASKS:
        known = ", ".join(map(repr, TASKS))
        raise ModelError(f"the task {task!r} is not supported; there is {known}, and a model goes behind it: pipeline({TASKS[0]!r}, ...)")
    if task != TASKS[0]:
        left = {
            "compress": (compress, "identity"),
            "batch_size": (batch_size, 16),
            "quantize": (quantize, "none"),
            "gguf_file": (gguf_file, ""),
        }
        return _making(task, _name(model), dtype, device, kv, progress, left)
    # what is wrong with the words is told before seconds are spent on weights
    steps, name, place = compression("identity" if compress is None else compress), _name(model), find_device(device)
    _check_number("batch_size", batch_size)
    recall, file = recalling(kv), _file(gguf_file)
    told = while_it_lasts if progress else quiet
    vlm = open_model(name, resolve_dtype(dtype, place), place, resolve_quantize(quantize, place), file, told)
    return Pipeline(vlm, steps, batch_size, recall)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model and what its compress stage does. Calls share nothing but what `recall` keeps, which goes by content and changes no answer.

    A batch runs `batch_size` rows at a time, which bounds its memory and changes no answer. Raises InputError where that is below 1, and
    for a memory that does not hold what the model remembers.
    """

    vlm: VLM
    compression: Compression = Compression()
    batch_size: int = 16
    recall: Recall = field(default_factory=Recall, repr=False, compare=False)
    adapters: Adapters = field(default_factory=Adapters, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("batch_size", self.batch_size)
        if self.vlm.decoder.config.levels and isinstance(self.recall.memory, PagedMemory | RoundedMemory | PolicyMemory):
            told = "this model remembers in levels, coarser with distance, and no other memory holds those"
            raise InputError(f"{told}; leave it out, or write dense", item="kv")

    def __copy__(self) -> "Pipeline":
        return replace(self)

    def __deepcopy__(self, memo: dict[int, object]) -> "Pipeline":
        """A pipeline with a model of its own, which recalls nothing yet; adapters that are loaded, which nothing changes, it has, too."""
        parts = {one.name: deepcopy(getattr(self, one.name), memo) for one in fields(self)}
        return Pipeline(**parts)

    def __reduce__(self) -> NoReturn:
        told = "a pipeline cannot be pickled, nor sent to another process: it is a model in memory"
        raise InputError(f"{told}; call mmsdk.pipeline(...) there, or copy.deepcopy(pipe) for a second one here", item="pipeline")

    def __repr__(self) -> str:
        return f"Pipeline({self.vlm.name!r}, compress={self.compression.spec!r}, batch_size={self.batch_size})"

    @overload
    def __call__(
        self, media: Given | Sequence[Given], question: str, *, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., seed: int = ..., stop: Stop = ..., repetition_penalty: float = ...,
        presence_penalty: float = ..., frequency_penalty: float = ..., max_time: float = ..., logprobs: int = ...,
        schema: Schema | None = ..., regex: str | None = ..., choice: Sequence[str] | None = ..., num_beams: int = ...,
        length_penalty: float = ..., early_stopping: EarlyStopping = ..., compress: CompressionSpec | None = ...,
        adapter: AdapterSpec = ...,
    ) -> Answer: ...  # fmt: skip

    @overload
    def __call__(
        self, media: Given | Sequence[Given], question: str, *, n: int, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., seed: int = ..., stop: Stop = ..., repetition_penalty: float = ...,
        presence_penalty: float = ..., frequency_penalty: float = ..., max_time: float = ..., logprobs: int = ...,
        schema: Schema | None = ..., regex: str | None = ..., choice: Sequence[str] | None = ..., num_beams: int = ...,
        length_penalty: float = ..., early_stopping: EarlyStopping = ..., compress: CompressionSpec | None = ...,
        adapter: AdapterSpec = ...,
    ) -> list[Answer]: ...  # fmt: skip

    @overload
    def __call__(
        self, media: Sequence[Question], *, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., seed: int = ..., stop: Stop = ..., repetition_penalty: float = ...,
        presence_penalty: float = ..., frequency_penalty: float = ..., max_time: float = ..., logprobs: int = ...,
        schema: Schema | None = ..., regex: str | None = ..., choice: Sequence[str] | None = ..., num_beams: int = ...,
        length_penalty: float = ..., early_stopping: EarlyStopping = ..., compress: CompressionSpec | None = ...,
        adapter: AdapterSpec | Sequence[AdapterSpec] = ...,
    ) -> list[Answer | MmsdkError]: ...  # fmt: skip

    @door
    def __call__(
        self,
        media: Given | Sequence[Given] | Sequence[Question],
        question: str | None = None,
        *,
        n: int | None = None,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Stop = (),
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        max_time: float = math.inf,
        logprobs: int = 0,
        schema: Schema | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        compress: CompressionSpec | None = None,
        adapter: AdapterSpec | Sequence[AdapterSpec] = "",
    ) -> Answer | list[Answer] | list[Answer | MmsdkError]:
        """Answer one question about an image, a clip or several of them, or a list of (media, question) pairs as one batch.

        A list or tuple of media is several inputs of one question (a clip given as frames goes in as `Frames` or a `Video`); none at all
        is a question without sight. In a batch, an item that cannot be answered gives its error in its place, and the others are answered
        as they would be alone, to within rounding: rows that run together may be summed in another order, which can change a token where
        two of them score alike. Settings are those of `GenerationConfig`; `compress` replaces the pipeline's own for this call. `adapter`
        names one that is loaded, or several with their weights, or, in a list, what each row of a batch has (`mmsdk.adapters`).

        The answer is JSON of a `schema`, what a `regex` matches whole, or one of `choice`, where one of these is given; it is its
        beginning where it ends by `max_tokens` or `max_time`. See `mmsdk.generate.constrain`.

        `n` answers of one question come as a list, with the seeds `seed`, `seed` + 1, ...: what is asked is read once. With
        `num_beams` above 1 an answer is the best that so many beams find, and `n` are the best of them, each with its `.score`
        (`mmsdk.generate.beams`).

        Raises InputError, and BudgetError, for a single question that cannot be answered, ModelError where its scores are not finite.
        Raises InputError before any work for settings that cannot be, and for a list in which nothing is a pair.
        """
        config = GenerationConfig(
            max_tokens, temperature, top_k, top_p, min_p, seed, stops(stop), repetition_penalty, presence_penalty, frequency_penalty,
            max_time, logprobs, Constraint.of(schema, regex, choice), num_beams, length_penalty, early_stopping,
        )  # fmt: skip
        if n is not None:
            _check_number("n", n)
        checked(self.vlm, config, n or 1)
        steps = self.compression if compress is None else compression(compress)
        if question is None:
            pairs = pairs_of(media)
            if n is not None:
                raise InputError("several answers are given to one question; ask those of a list one by one", item="n")
            return self._batch(pairs, config, steps, self.adapters.worn(adapter, len(pairs)))
        asked, worn = (cast(Given | Sequence[Given], media), question), self.adapters.worn(adapter, 1)
        if n is not None:
            return sampled(self.vlm, steps, asked, config, self.recall, worn, n, self.batch_size)
        (answer,) = self._batch([asked], config, steps, worn)
        if isinstance(answer, MmsdkError):
            raise alone(answer)
        return answer

    @door
    def stream(
        self,
        media: Given | Sequence[Given],
        question: str | None = None,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Stop = (),
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        max_time: float = math.inf,
        logprobs: int = 0,
        schema: Schema | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        compress: CompressionSpec | None = None,
        adapter: AdapterSpec = "",
    ) -> Stream:
        """The same answer in pieces, as they become certain; the pieces joined are the answer. That of several beams is one piece.

        Without a question the error tells what is missing, or the form in which what chat messages say is to be written. Errors are raised
        here, at once; only scores that are not finite, and a form that cannot be followed further, end the stream later, with a ModelError
        or an InputError where they occur.
        """
        config = GenerationConfig(
            max_tokens, temperature, top_k, top_p, min_p, seed, stops(stop), repetition_penalty, presence_penalty, frequency_penalty,
            max_time, logprobs, Constraint.of(schema, regex, choice), num_beams, length_penalty, early_stopping,
        )  # fmt: skip
        checked(self.vlm, config)
        steps = self.compression if compress is None else compression(compress)
        worn = self.adapters.worn(adapter, 1)
        if question is None:
            refuse_messages(media)
            refuse_pairs(media)
            raise InputError('the question is missing; write pipe.stream("photo.jpg", "What is it?")', item="question")
        return streamed(self.vlm, steps, (media, question), config, self.recall, worn)

    @door
    def chat(
        self,
        system: str | None = "",
        config: GenerationConfig | None = None,
        *,
        compress: CompressionSpec | None = None,
        adapter: AdapterSpec = "",
    ) -> Chat:
        """A conversation, whose turns read only what is new; see `mmsdk.chat`. `config` are the settings of its answers.

        `system` is what the model is told before it, where its template has a place for that. Raises InputError for one that is no text,
        for what are no settings, and for an adapter that is not loaded.
        """
        steps = self.compression if compress is None else compression(compress)
        return Chat(self.vlm, steps, self.recall, system, config, self.adapters.worn(adapter, 1))

    @door
    def encode(self, source: Source, adapter: AdapterSpec = "") -> Encoded:
        """Encode a picture or a clip once, to ask about it often: what is given back stands wherever a picture may stand.

        All its tokens are kept aside in the processor's memory, and each question chooses from them anew. It is asked about with the
        `adapter` that it was encoded with, where that changes what sees. Raises InputError for what cannot be read, for an adapter that is
        not loaded, and for a list, whose items are encoded one by one.
        """
        if isinstance(source, list | tuple):
            raise InputError(
                "a list is several inputs; encode them one by one (a clip given as frames goes in as Frames or a Video)", item="source"
            )
        media = load(source)
        eye = self.adapters.worn(adapter, 1).eye(self.vlm, 0)
        (tokens,) = eye.encoder([media])
        return Encoded.of(media, tokens, eye.name)

    @door
    def watch(self, by: str | Compressor = "simplecluster", *, hold: int = 1024, window: int = 8) -> Watch:
        """A clip whose frames come one after another, in bounded memory: at most `hold` tokens, chosen or merged `by` a method.

        A method is named without an amount ("evs", "simplecluster:rounds=5"); `window` frames go through the encoder together. Raises
        PluginError for a method that is unknown, does not work between encoder and decoder, asks for the question, or keeps all tokens.
        """
        return Watch(self.vlm, by if isinstance(by, Compressor) else holding(by), hold, window)

    @door
    def load_adapter(self, path: str | os.PathLike[str], name: str) -> None:
        """Read an adapter that PEFT saved, from a folder or "org/name" on the hub; calls then choose it by its name.

        Raises InputError for what is no path or no name, WeightsError for files that are missing or damaged, ModelError for what cannot be
        used here (`mmsdk.weights.peft`).
        """
        self.adapters.load(path, name, self.vlm)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises InputError where there is none of that name."""
        self.adapters.unload(name)

    def merge(self, adapter: AdapterSpec) -> "Pipeline":
        """A pipeline whose weights have the adapter, or several, in them: as fast as without. It has no other adapters yet.

        This one stays as it is, and answers without them as before. Both share what is not changed; the changed matrices are there twice
        for as long as both are kept. Raises InputError for a name that is not known, ModelError for weights in fewer bits.
        """
        vlm, adapters = self.adapters.merged(adapter, self.vlm)
        return replace(self, vlm=vlm, adapters=adapters)

    @door
    def stream_session(self, kv: str | None = None, *, window: int = 8, adapter: AdapterSpec = "") -> StreamSession:
        """A stream without end: frames and words are read as they come, and it can be asked at any time. See `mmsdk.stream`.

        `kv` says by which policy of the memory, and how many tokens of each layer, it is held ("window:1024", "h2o:512"); where it is None
        that is "streaming:1024", or of a model whose context is no longer, half its context. `window` frames go through the encoder
        together. What the pipeline compresses is compressed in each window; `adapter`, one or several, is worn for all that the stream
        reads and says. Raises PluginError for a policy that does not bound a stream and for a compression that works
        inside encoder or decoder or asks for the question, BudgetError for a share and for more than the model's context, ModelError for a
        model whose positions cannot close up, or not under this policy, InputError for an adapter that is not loaded and for windows of
        more tokens than are held.
        """
        return StreamSession(self.vlm, self.compression, kv, window, self.adapters.worn(adapter, 1))

    def _batch(self, items: Sequence[Question], config: GenerationConfig, steps: Compression, worn: Worn) -> list[Answer | MmsdkError]:
        found: dict[int, Answer | MmsdkError] = {}
        # beams are rows, too
        together = max(1, self.batch_size // config.num_beams)
        for first in range(0, len(items), together):
            found |= answered(self.vlm, steps, items[first : first + together], config, self.recall, worn, first)
        return [found[index] for index in range(len(items))]


def _check_number(name: str, number: object) -> None:
    if not whole(number, 1):
        raise InputError(f"it is {shown(number)}, expected a whole number of at least 1", item=name)


def _making(
    task: str, name: str, dtype: str | torch.dtype | None, device: str | torch.device | None, kv: str | None, progress: bool,
    left: Mapping[str, tuple[object, object]],
) -> VideoGeneration | World:  # fmt: skip
    """What makes clips or worlds. Raises InputError for an argument that only models which answer have: one of `left`, or `kv`."""
    world = task == "world-model"
    others = dict(left) if world else {**left, "kv": (kv, "dense")}
    for argument, (value, usual) in others.items():
        if value not in (None, usual):
            raise InputError(f"{shown(value)} is for {TASKS[0]!r}; leave it out of {task!r}", item=argument)
    place = find_device(device)
    if not world:
        return VideoGeneration(open_maker(name, resolve_dtype(dtype, place), place), name, progress)
    pages = Paging() if kv in (None, "dense") else paging(kv)
    return World(open_world(name, resolve_dtype(dtype, place), place), name, pages)


def _name(model: object) -> str:
    # an empty one would be taken for the folder that the program runs in
    if not isinstance(model, str | os.PathLike) or not (name := os.fsdecode(model)).strip():
        raise ModelError(f'the model {shown(model)} is no name and no folder; write "mini", a folder, or "org/name"')
    return name


def _file(gguf_file: object) -> str:
    if gguf_file is not None and not isinstance(gguf_file, str | os.PathLike):
        raise InputError(f'{shown(gguf_file)} is no file; write its name, such as "model-Q4_1.gguf"', item="gguf_file")
    return "" if gguf_file is None else os.fsdecode(gguf_file)
