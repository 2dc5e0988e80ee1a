"""FAST: actions as a short text of frequencies (Pertsch et al., arXiv 2501.09747; openpi's source) [published].

A chunk is transformed over time (DCT-II, orthonormal), scaled and rounded, q = round(s C); the lowest frequency of every dimension comes
first. Each q becomes the character q - min_token, and a byte-pair encoding learned on such texts shortens them. pi0-FAST says those tokens
as the last of PaliGemma's vocabulary: id = vocabulary - 1 - 128 - token.

What breaks a text is refused here by name; upstream clips it, pads it, or acts on zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as Backend
from torch import Tensor

from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError, ModelError, SafetyError, WeightsError
from mmsdk.kv.types import KVCache
from mmsdk.stages import Context
from mmsdk.vla.types import ActionChunk, Observation
from mmsdk.weights.fields import read_fields

__all__ = ["FastCodec", "FastHead", "dct_basis", "read_codec"]

_LAST, _BROKEN = 0x10FFFF, 0xFFFD


@dataclass(frozen=True, slots=True)
class FastCodec:
    """Actions, normalised to about [-1, 1], to token ids and back. `bpe` may be any tokenizer that keeps every character."""

    bpe: Backend
    min_token: int
    scale: float = 10.0

    @staticmethod
    def fit(chunks: Sequence[Float[Tensor, "h a"]], vocabulary: int = 1024, scale: float = 10.0) -> "FastCodec":
        """Learn the byte-pair encoding of these chunks, on all 256 bytes. A coefficient below their lowest has no character later."""
        coefficients = [_quantised(chunk, scale) for chunk in chunks]
        lowest = int(min(int(q.min()) for q in coefficients))
        texts = ["".join(map(chr, (q - lowest).flatten().tolist())) for q in coefficients]
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, vocab_size=vocabulary, min_frequency=2, show_progress=False)
        return FastCodec(Backend.from_str(bpe.to_str()), lowest, scale)

    def encode(self, actions: Float[Tensor, "h a"]) -> list[int]:
        """The tokens of a chunk. Raises InputError for numbers that are not finite, and for a chunk that would not come back exactly."""
        q = _quantised(actions, self.scale)
        codes: list[int] = (q - self.min_token).flatten().tolist()
        wrong = next((code for code in codes if not 0 <= code <= _LAST or 0xD800 <= code <= 0xDFFF or code == _BROKEN), None)
        if wrong is not None:
            raise InputError(f"a coefficient of {wrong + self.min_token} has no character (code {wrong}); normalise them", item="actions")
        ids: list[int] = self.bpe.encode("".join(map(chr, codes))).ids
        if self._codes(ids) != codes:
            raise InputError("they have a frequency that this tokenizer was not trained on; fit one to such data", item="actions")
        return ids

    def decode(self, ids: Sequence[int], horizon: int, dims: int) -> Float[Tensor, "h a"]:
        """The actions of a token text. Raises InputError where the text is broken or is not of horizon x dims numbers: never zeros."""
        codes = self._codes(ids)
        if len(codes) != horizon * dims:
            raise InputError(f"they make {len(codes)} numbers, {horizon} actions of {dims} are {horizon * dims}", item="tokens")
        q = torch.tensor(codes, dtype=torch.float64).view(horizon, dims) + self.min_token
        return (dct_basis(horizon).T @ (q / self.scale)).float()

    def bound(self, horizon: int) -> float:
        """The largest error that rounding can make in any one number: half a step in every frequency, all of them in phase."""
        return float(0.5 / self.scale * dct_basis(horizon).abs().sum(0).max())

    def _codes(self, ids: Sequence[int]) -> list[int]:
        size = self.bpe.get_vocab_size()
        unknown = next((token for token in ids if not 0 <= token < size), None)
        if unknown is not None:
            raise InputError(f"there is no token {unknown}; the vocabulary has {size}", item="tokens")
        text: str = self.bpe.decode(list(ids), skip_special_tokens=False)
        if chr(_BROKEN) in text:
            raise InputError("they end or begin in the midst of a character", item="tokens")
        return [ord(character) for character in text]


@dataclass(frozen=True, slots=True)
class FastHead:
    """An `ActionHead` that says its actions, token by token, after the prompt `state.fast_prompt`.

    `start` are the ids of "Action: ", `stop` the id of "|", `vocabulary` that of the decoder without padding. Only action tokens and `stop`
    are ever said, the likeliest first; where the text is broken it is drawn anew, `attempts` times in all, at `temperature`.
    """

    decoder: Decoder
    codec: FastCodec
    horizon: int
    dims: int
    start: tuple[int, ...]
    stop: int
    vocabulary: int = 257_152
    limit: int = 256
    attempts: int = 3
    temperature: float = 0.7

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.temperature <= 0:
            raise InputError(f"attempts {self.attempts} is at least 1, temperature {self.temperature} above 0", item="fast")

    def __call__(self, context: Context, observation: Observation) -> ActionChunk:
        """One chunk for one row. Raises SafetyError where every attempt is broken; what was wrong with the last is its cause.

        Raises ModelError where the decoder's logits are not finite.
        """
        generator, broken = torch.Generator().manual_seed(observation.stamp.seed), InputError("nothing was said", item="tokens")
        for attempt in range(self.attempts):
            ids = self.say(context, generator, self.temperature if attempt else 0.0)
            try:
                actions = self.codec.decode(ids, self.horizon, self.dims)
            except InputError as error:
                broken = error
                continue
            return ActionChunk(actions.to(observation.state.device), observation.stamp, producer="fast")
        raise SafetyError(f"{self.attempts} texts of action tokens in a row were broken; the last: {broken}") from broken

    @torch.no_grad()
    def say(self, context: Context, generator: torch.Generator, temperature: float) -> list[int]:
        """FAST tokens up to `stop` or the limit, causal after the prompt; the context is only read."""
        cache, device = context.cache.fork(), context.hidden.device
        allowed = torch.tensor([*(self._id(token) for token in range(self.codec.bpe.get_vocab_size())), self.stop], device=device)
        hidden = self._advance(torch.tensor([self.start], device=device), cache)
        said: list[int] = []
        while len(said) < self.limit:
            choice = _chosen(self.decoder.logits(hidden)[0, allowed], generator, temperature)
            if choice == len(allowed) - 1:
                break
            said.append(choice)
            hidden = self._advance(allowed[choice].view(1, 1), cache)
        return said

    def _id(self, token: int) -> int:
        return self.vocabulary - 1 - 128 - token

    def _advance(self, ids: Int[Tensor, "b s"], cache: KVCache) -> Float[Tensor, "b d"]:
        positions = cache.position[:, None] + torch.arange(ids.shape[1], device=ids.device)
        hidden: Tensor = self.decoder(self.decoder.embed(ids), positions, cache)
        return hidden[:, -1]


def read_codec(folder: Path) -> FastCodec:
    """A codec as it is published: `tokenizer.json` and `processor_config.json`. Raises WeightsError for files that cannot be read."""
    fields, path = read_fields(folder / "processor_config.json"), folder / "tokenizer.json"
    try:
        bpe = Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise WeightsError(f"{path} is missing or damaged: {error}") from error
    return FastCodec(bpe, fields.whole("min_token"), fields.real("scale", 10.0))


def dct_basis(size: int) -> Float[Tensor, "k t"]:
    """The orthonormal DCT-II as a matrix: row k is the cosine of k half waves, its transpose the inverse."""
    k, t = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)
    basis: Tensor = torch.cos(torch.pi * k * (2 * t + 1) / (2 * size)) * (2 / size) ** 0.5
    basis[0] *= 0.5**0.5
    return basis


def _quantised(actions: Float[Tensor, "h a"], scale: float) -> Int[Tensor, "h a"]:
    if not bool(actions.isfinite().all()):
        raise InputError("they are not finite", item="actions")
    return (scale * (dct_basis(actions.shape[0]) @ actions.double().cpu())).round().long()


def _chosen(scores: Float[Tensor, " v"], generator: torch.Generator, temperature: float) -> int:
    if not bool(scores.isfinite().all()):
        raise ModelError("fast: logits of action tokens are not finite; no token is likeliest")
    if not temperature:
        return int(scores.argmax())
    return int(torch.multinomial((scores.cpu() / temperature).softmax(-1), 1, generator=generator))
