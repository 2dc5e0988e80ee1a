"""What a pipeline recalls between calls: pictures and clips it has encoded, and prompts whose keys and values it still holds.

Both go by content. A picture is its decoded, upright pixels and their shape, a clip its frames and their times: however it was handed
over, and whatever a file of its name holds by now. What the decoder knows depends on more: on how the input was compressed, and by a
method that asks on the question, too. All of that is in the key of every block of a prompt (`mmsdk.kv.prefix`).
"""

import dataclasses
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from mmsdk.compress import Compression
from mmsdk.decoder.quantised import precision
from mmsdk.encoded import Encoded
from mmsdk.kv.memory import DenseMemory, Memory, memory_of
from mmsdk.kv.prefix import Look, Run, Words, chain, digest
from mmsdk.models.types import VLM
from mmsdk.prompt import Ids, Layout, Learned, Prompt, Slot, Span
from mmsdk.tokencomp.plan import reading_key
from mmsdk.vision.types import Media, Video, VisualTokens

__all__ = ["SIGHTS", "Recall", "Sights", "content", "keys_of", "recalling"]


# Bytes of encoded pictures and clips that are kept: some hundreds of pictures.
SIGHTS = 128 * 2**20


class Sights:
    """Encoded pictures and clips by content, in at most `most` bytes; the longest unused make room. 0 keeps nothing."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> "Sights":
        """As much room, and nothing in it yet."""
        return Sights(self.most)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept."""
        return self._bytes

    def known(self, prompt: Prompt, contents: Sequence[bytes]) -> Prompt:
        """The prompt with what was encoded before in the place of its pictures and clips."""
        media = iter(contents)
        with self._lock:
            found = list(prompt.segments)
            for place, segment in enumerate(found):
                if isinstance(segment, Media | Encoded):
                    key = next(media)
                    if isinstance(segment, Media) and key in self._kept:
                        self._kept.move_to_end(key)
                        found[place] = dataclasses.replace(self._kept[key], source=segment.source, notes=segment.notes)
        return dataclasses.replace(prompt, segments=tuple(found))

    def learn(self, key: bytes, media: Media, tokens: VisualTokens, model: str) -> None:
        """Keep what an encoder made of a picture or a clip, where it fits at all."""
        size = _size(tokens)
        if size > self.most:
            return
        encoded = Encoded.of(media, _own(tokens), model)
        with self._lock:
            if key in self._kept:
                return
            while self._bytes + size > self.most:
                self._bytes -= _size(self._kept.popitem(last=False)[1].tokens)
            self._kept[key], self._bytes = encoded, self._bytes + size


@dataclass(frozen=True, slots=True)
class Recall:
    """Where caches come from, what was seen before, and whose it is: nothing is shared with another `tenant`."""

    memory: Memory = field(default_factory=DenseMemory)
    sights: Sights = field(default_factory=Sights)
    tenant: str = ""

    def looked_up(
        self, prompts: Mapping[int, Prompt], compression: Compression, eyes: Mapping[int, str] = MappingProxyType({})
    ) -> tuple[dict[int, Prompt], dict[int, list[bytes]]]:
        """The prompts with what was encoded before, and the contents of their media; none of these where nothing is recalled.

        `eyes` names what a row is looked at with where that is not the model itself, and what is known is known of it alone. A step inside
        the encoder needs the picture itself.
        """
        if not (self.memory.page or self.sights.most):
            return dict(prompts), {}
        mine = {index: [self.tenant.encode(), *([eyes[index].encode()] if index in eyes else [])] for index in prompts}
        contents = {index: [digest(*mine[index], content(item)) for item in prompt.media] for index, prompt in prompts.items()}
        if compression.inside_encoder:
            return dict(prompts), contents
        return {index: self.sights.known(prompt, contents[index]) for index, prompt in prompts.items()}, contents

    def waves(
        self, rows: Mapping[int, Prompt], compression: Compression, contents: Mapping[int, Sequence[bytes]]
    ) -> Iterator[dict[int, Prompt]]:
        """The rows of a batch that go through the encoder together, and then, if there are any, those that look at the same as one of them.

        These find it encoded, as long as what was made of the others is told (`saw`) in between.
        """
        met, later = set[bytes](), list[int]()
        for index in rows if self.sights.most and not compression.inside_encoder else ():
            if not met.isdisjoint(contents[index]):
                later.append(index)
            met.update(contents[index])
        yield {index: row for index, row in rows.items() if index not in later}
        if later:
            yield {index: self.sights.known(rows[index], contents[index]) for index in later}

    def saw(
        self,
        models: Mapping[int, str],
        compression: Compression,
        prompts: Mapping[int, Prompt],
        contents: Mapping[int, Sequence[bytes]],
        seen: Mapping[int, Sequence[VisualTokens]],
    ) -> None:
        """Keep what was encoded now, by the model of each row; nothing where a step inside the encoder left only part of it."""
        for index, keys in () if compression.inside_encoder else contents.items():
            for item, key, tokens in zip(prompts[index].media, keys, seen.get(index, ()), strict=False):
                if not isinstance(item, Encoded):
                    self.sights.learn(key, item, tokens, models[index])


def recalling(kv: str | None) -> Recall:
    """What a pipeline with this kind of cache recalls ("dense" nothing). Raises InputError for a kind that is not known."""
    memory = memory_of(kv)
    return Recall(memory, Sights(SIGHTS if memory.page else 0))


def content(item: Media | Encoded) -> bytes:
    """A digest of everything that an encoder sees of an input."""
    if isinstance(item, Encoded):
        return digest(b"encoded", item.model.encode(), *(_raw(part) for part in _tensors(item.tokens)))
    if isinstance(item, Video):
        return digest(b"clip", _raw(item.frames), _raw(item.times))
    return digest(b"picture", _raw(item.pixels))


def keys_of(
    vlm: VLM,
    recall: Recall,
    plans: Mapping[int, Compression],
    prompts: Mapping[int, Prompt],
    contents: Mapping[int, Sequence[bytes]],
    entering: Mapping[int, Sequence[VisualTokens]],
    worn: Callable[[int], bytes],
) -> list[list[bytes]]:
    """The keys of each row's blocks; none where nothing is remembered, or what a method does cannot be said.

    `contents` and `entering` are of each visual input of a row: what it is, and the tokens of it that go into the decoder. `worn` tells a
    row's adapters from any others.
    """
    model = digest(recall.tenant.encode(), vlm.name.encode(), precision(vlm.decoder).encode())
    rows = []
    for index, tokens in entering.items():
        plan, prompt, root = plans[index], prompts[index], digest(model, worn(index))
        # where a token sees what comes after it, what is known of a prompt holds for no other
        keyed = recall.memory.page and _tellable(plan) and vlm.decoder.config.sees == "before"
        looks = [digest(key, *_told(plan, prompt)) for key in contents[index]] if keyed else []
        rows.append(chain(root, _runs(vlm.layout(prompt), looks, tokens), recall.memory.page) if keyed else [])
    return rows


def _runs(layout: Layout, looks: Sequence[bytes], entering: Sequence[VisualTokens]) -> list[Run]:
    resolved = layout.resolved([reading_key(tokens.positions, tokens.grid) for tokens in entering])
    lengths = resolved.lengths([len(tokens) for tokens in entering])
    return [_run(span, length, looks) for span, length in zip(resolved.spans, lengths, strict=True)]


def _run(span: Span, length: int, looks: Sequence[bytes]) -> Run:
    """What a span says. The vectors between the parts of an input are the model's, and the same wherever their number is."""
    if isinstance(span, Slot):
        return Look(digest(looks[span.media], struct.pack("<q", span.start)), length)
    return Words(span.ids) if isinstance(span, Ids) else Look(digest(Learned.__name__.encode(), _raw(span.vectors)), length)


def _tellable(plan: Compression) -> bool:
    """Whether two plans that say the same do the same: their methods are values, and none works between the decoder's layers, where
    what stays depends on everything that is asked."""
    return not plan.inside_decoder and all(dataclasses.is_dataclass(step.method) for step in plan.steps)


def _told(plan: Compression, prompt: Prompt) -> list[bytes]:
    """What becomes of an input besides its content: the steps with all their knobs, and the question where one of them asks."""
    steps = [f"{type(step.method).__module__}.{step.method!r}:{step.amount!r}".encode() for step in plan.steps]
    return [*steps, prompt.text.encode()] if plan.asks else steps


def _tensors(tokens: VisualTokens) -> list[Tensor]:
    keys = [] if tokens.keys is None else [tokens.keys]
    return [tokens.features, tokens.positions, tokens.weight, tokens.times, tokens.saliency, *keys, *tokens.deep]


def _size(tokens: VisualTokens) -> int:
    return sum(part.nbytes for part in _tensors(tokens))


def _own(tokens: VisualTokens) -> VisualTokens:
    """The same in memory of its own: as a slice of a batch it would keep all of the batch."""
    return dataclasses.replace(
        tokens,
        features=tokens.features.clone(),
        keys=None if tokens.keys is None else tokens.keys.clone(),
        deep=tuple(part.clone() for part in tokens.deep),
    )


def _raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor, behind its type and shape: equal bytes of another shape are another content."""
    head = f"{tensor.dtype}".encode() + struct.pack(f"<{tensor.ndim}q", *tensor.shape)
    return head + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
