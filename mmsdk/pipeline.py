"""The pipeline: media and a question in, an answer out, by way of load, encode, compress, prefill and decode, each timed.

pipe = pipeline("image-text-to-text")
answer = pipe("photo.jpg", "What is on the table?")
for piece in pipe.stream("clip.mp4", "What happens?"): print(piece, end="")
answers = pipe([("a.jpg", "Which colour?"), ("b.png", "How many?")])
photo = pipe.encode("photo.jpg")  # asked about again and again, encoded once
"""

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast, overload

import torch

from mmsdk.answer import Answer, Tokens
from mmsdk.compress import Compression, CompressionSpec, compression
from mmsdk.decoder.quantised import precision
from mmsdk.encoded import Encoded, Given
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.families import open_model
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.loop import Generated, Step, collect, generate
from mmsdk.models.types import VLM
from mmsdk.precision import resolve_dtype, resolve_quantize
from mmsdk.recall import Recall, recalling
from mmsdk.stages import Clock, Context, Question, Row, device_of, prepare
from mmsdk.tokencomp.types import Compressor
from mmsdk.vision.intake import Source, load
from mmsdk.vision.values import shown, whole
from mmsdk.watch import Watch, holding

__all__ = ["Answer", "Context", "Pipeline", "Stream", "pipeline"]

TASKS = ("image-text-to-text",)


def pipeline(
    task: str = "image-text-to-text",
    model: str | os.PathLike[str] = "mini",
    *,
    compress: CompressionSpec = "identity",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    batch_size: int = 16,
    quantize: str = "none",
    kv: str = "dense",
) -> "Pipeline":
    """Put a model's parts together, ready to answer.

    `model` is "mini", a folder, or "org/name"; `compress` says what the compress stage keeps ("uniform:64"); `dtype` "auto" is bfloat16
    where the device computes in it natively, else float32; `batch_size` is how many rows of a batch run together; `quantize` "int4" or
    "int8" stores the language model's matrices in fewer bits (processor only); `kv` "paged" keeps what the decoder knows in blocks, and
    pictures as they were encoded, so that a later question about the same picture begins where the earlier one did, and "int8", "int4",
    "int2" or "fp8" keeps all but the last tokens in fewer bits, which may change answers.
    Raises ModelError for a task, model or precision that is not supported, WeightsError where weights cannot be had, PluginError or
    BudgetError for a compression that cannot be, InputError for a batch size below 1 and an unknown `kv`.
    """
    if task not in TASKS:
        known = ", ".join(map(repr, TASKS))
        raise ModelError(f"the task {task!r} is not supported; there is {known}, and a model goes behind it: pipeline({TASKS[0]!r}, ...)")
    # what is wrong with the words is told before seconds are spent on weights
    steps, name, place = compression(compress), _name(model), _device(device)
    _check_batch_size(batch_size)
    recall = recalling(kv)
    vlm = open_model(name, resolve_dtype(dtype, place), place, resolve_quantize(quantize, place))
    return Pipeline(vlm, steps, batch_size, recall)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model and what its compress stage does. Calls share nothing but what `recall` keeps, which goes by content and changes no answer.

    A batch runs `batch_size` rows at a time, which bounds its memory and changes no answer. Raises InputError where that is below 1.
    """

    vlm: VLM
    compression: Compression = Compression()
    batch_size: int = 16
    recall: Recall = field(default_factory=Recall, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_batch_size(self.batch_size)

    @overload
    def __call__(
        self, media: Given | Sequence[Given], question: str, *, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., seed: int = ..., stop: tuple[str, ...] = ..., compress: CompressionSpec | None = ...,
    ) -> Answer: ...  # fmt: skip

    @overload
    def __call__(
        self, media: Sequence[Question], *, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., seed: int = ..., stop: tuple[str, ...] = ..., compress: CompressionSpec | None = ...,
    ) -> list[Answer | MmsdkError]: ...  # fmt: skip

    def __call__(
        self,
        media: Given | Sequence[Given] | Sequence[Question],
        question: str | None = None,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        compress: CompressionSpec | None = None,
    ) -> Answer | list[Answer | MmsdkError]:
        """Answer one question about an image, a clip or several of them, or a list of (media, question) pairs as one batch.

        A list or tuple of media is several inputs of one question (a clip given as frames goes in as `Frames` or a `Video`); none at all
        is a question without sight. In a batch, an item that cannot be answered gives its error in its place, and the others are answered
        as they would be alone, to within rounding: rows that run together may be summed in another order, which can change a token where
        two of them score alike. Settings are those of `GenerationConfig`; `compress` replaces the pipeline's own for this call.

        Raises InputError, and BudgetError, for a single question that cannot be answered, ModelError where its scores are not finite.
        Raises InputError before any work for settings that cannot be, and for a list in which nothing is a pair.
        """
        config = GenerationConfig(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
        steps = self.compression if compress is None else compression(compress)
        if question is None:
            return self._batch(_pairs(media), config, steps)
        (answer,) = self._batch([(cast(Given | Sequence[Given], media), question)], config, steps)
        if isinstance(answer, MmsdkError):
            raise _alone(answer)
        return answer

    def stream(
        self,
        media: Given | Sequence[Given],
        question: str,
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        compress: CompressionSpec | None = None,
    ) -> "Stream":
        """The same answer in pieces, as they become certain; the pieces joined are the answer.

        Errors are raised here, at once; only scores that are not finite end the stream later, with a ModelError where they occur.
        """
        config = GenerationConfig(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
        steps = self.compression if compress is None else compression(compress)
        clock = Clock(device_of(self.vlm))
        ready = prepare(self.vlm, steps, [(media, question)], max_tokens, clock, recall=self.recall)
        for error in ready.errors.values():
            raise _alone(error)
        (row,) = ready.rows.values()
        assert ready.context is not None, "a row without an error has a context"
        return Stream(self._pieces(row, ready.context, config, clock))

    def encode(self, source: Source) -> Encoded:
        """Encode a picture or a clip once, to ask about it often: what is given back stands wherever a picture may stand.

        All its tokens are kept aside in the processor's memory, and each question chooses from them anew. Raises InputError for what cannot
        be read, and for a list, whose items are encoded one by one.
        """
        if isinstance(source, list | tuple):
            raise InputError(
                "a list is several inputs; encode them one by one (a clip given as frames goes in as Frames or a Video)", item="source"
            )
        media = load(source)
        (tokens,) = self.vlm.encoder([media])
        return Encoded.of(media, tokens, self.vlm.name)

    def watch(self, by: str | Compressor = "simplecluster", *, hold: int = 1024, window: int = 8) -> Watch:
        """A clip whose frames come one after another, in bounded memory: at most `hold` tokens, chosen or merged `by` a method.

        A method is named without an amount ("evs", "simplecluster:rounds=5"); `window` frames go through the encoder together. Raises
        PluginError for a method that is unknown, does not work between encoder and decoder, or asks for the question.
        """
        return Watch(self.vlm, by if isinstance(by, Compressor) else holding(by), hold, window)

    def _batch(self, items: Sequence[Question], config: GenerationConfig, steps: Compression) -> list[Answer | MmsdkError]:
        found: dict[int, Answer | MmsdkError] = {}
        for first in range(0, len(items), self.batch_size):
            found |= self._group(items[first : first + self.batch_size], first, config, steps)
        return [found[index] for index in range(len(items))]

    def _group(self, items: Sequence[Question], first: int, config: GenerationConfig, steps: Compression) -> dict[int, Answer | MmsdkError]:
        """Answers and errors of rows that run together, by their place in the whole batch."""
        clock = Clock(device_of(self.vlm))
        ready = prepare(self.vlm, steps, items, config.max_tokens, clock, first, self.recall)
        with clock.stage("decode"):
            texts = [] if ready.context is None else self._decode(ready.context, [config] * len(ready.rows))
        kind = precision(self.vlm.decoder)
        answers = {i: _answer(row, text, config.seed, clock, kind) for (i, row), text in zip(ready.rows.items(), texts, strict=True)}
        return {**ready.errors, **answers}

    def _steps(self, context: Context, configs: Sequence[GenerationConfig]) -> Iterator[Step]:
        vlm = self.vlm
        return generate(vlm.decoder, context.hidden, context.cache, configs, vlm.tokenizer.decode, vlm.stop_ids)

    def _decode(self, context: Context, configs: Sequence[GenerationConfig]) -> list[Generated]:
        return collect(self._steps(context, configs), len(configs))

    def _pieces(self, row: Row, context: Context, config: GenerationConfig, clock: Clock) -> Generator[str, None, Answer]:
        said: list[Step] = []
        steps = self._steps(context, [config])
        while True:
            # only the work is timed, not what the reader does between two pieces
            with clock.stage("decode"):
                step = next(steps, None)
            if step is None:
                break
            # models begin with the space between prompt and answer, which is no part of the answer
            piece = step.text if any(earlier.text.strip() for earlier in said) else step.text.lstrip()
            said.append(step)
            if piece:
                yield piece
        answer = _answer(row, collect(said, 1)[0], config.seed, clock, precision(self.vlm.decoder))
        if isinstance(answer, ModelError):
            raise answer
        return answer


class Stream(Iterator[str]):
    """Pieces of an answer, computed as they are asked for. Leaving early costs nothing more."""

    def __init__(self, pieces: Generator[str, None, Answer]) -> None:
        self._pieces = pieces
        self._answer: Answer | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self._answer = end.value
            raise

    @property
    def answer(self) -> Answer:
        """The whole answer with its counts and timings; reads what is left of the stream first."""
        for _ in self:
            pass
        if self._answer is None:
            raise InputError("the stream was interrupted, so there is no whole answer", item="stream")
        return self._answer


def _answer(row: Row, text: Generated, seed: int, clock: Clock, kind: str) -> Answer | ModelError:
    if isinstance(text.finish, ModelError):
        return text.finish
    counts = Tokens(row.visual, row.kept, len(row.embeddings), len(text.ids), row.recalled)
    return Answer(text.text.lstrip(), counts, clock.timings, seed, text.finish, row.sights, kind)


def _alone(error: MmsdkError) -> MmsdkError:
    """The error of a single question, which has no place in a batch to name."""
    return error.at(None) if isinstance(error, InputError) else error


def _pairs(items: object) -> Sequence[Question]:
    """The batch as it is: what is wrong with one item becomes that item's error where it is read."""
    if isinstance(items, Iterator):
        raise InputError("pairs that come one after another are no batch yet; make it a list: pipe(list(...))", item=type(items).__name__)
    if not isinstance(items, list | tuple):
        raise InputError('a question is missing; write pipe("photo.jpg", "What is this?"), or a list of such pairs', item="question")
    if items and not any(isinstance(item, list | tuple) for item in items):
        told = 'pipe(["a.jpg", "b.jpg"], "Which is older?") asks one about them all, pipe([("a.jpg", "What is it?"), ...]) one about each'
        raise InputError(f"a list of media alone has no question; {told}", item="question")
    return items


def _check_batch_size(size: object) -> None:
    if not whole(size, 1):
        raise InputError(f"batch_size is {shown(size)}, expected a whole number of at least 1", item="batch_size")


def _name(model: object) -> str:
    # an empty one would be taken for the folder that the program runs in
    if not isinstance(model, str | os.PathLike) or not (name := os.fsdecode(model)).strip():
        raise ModelError(f'the model {shown(model)} is no name and no folder; write "mini", a folder, or "org/name"')
    return name


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"the device {shown(device)} is not known: {error}") from None
    here = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (place.index or 0) >= here.get(place.type, 0):
        raise ModelError(f"the device {device!r} was asked for, but torch sees none such here; leave it out to run on the processor")
    return place
