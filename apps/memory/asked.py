"""What a memory is asked: a prompt that is read whole, and what comes after its policy has acted.

The prompt is thinned when it has been read. Then come the words of a `cue`, and behind them is scored how likely, or how early among the
choices of the model, the words of the `answer` are: nothing that is scored was computed while everything was still there.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.apps.train_mini.clips import clip
from mmsdk.apps.train_mini.questions_clip import about_clip
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.compress import Compression
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.models.mini.words import asked as asked_of
from mmsdk.models.types import VLM, Tokenizer
from mmsdk.stages import Clock, Row, device_of, lay_out
from mmsdk.vision.types import Video

__all__ = ["Asked", "Score", "clip_questions", "needles", "texts"]

Score = Literal["likelihood", "words", "whole"]
"""The geometric mean of the probabilities of an answer's tokens; the share of them that are the first choice; whether all are."""

# Nobody looked at what this draws while mini's recipe was made (`mmsdk bench mini` uses another).
_SEED = 2_000_029
_DIGITS, _CUE = 5, 2
_CITIES = "Lima Oslo Cairo Quito Turin Perth Delhi Osaka Milan Sofia Dakar Kyoto".split()


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as the decoder takes it, the ids of the cue (at least one) and those of the answer; from where to where it is seen."""

    prompt: Float[Tensor, "1 s d"]
    cue: tuple[int, ...]
    answer: tuple[int, ...]
    score: Score
    sight: tuple[int, int] = (0, 0)

    @property
    def kinds(self) -> Int[Tensor, "1 s"]:
        """0 for words, 1 for what is seen."""
        places = torch.arange(self.prompt.shape[1], device=self.prompt.device)[None]
        return ((places >= self.sight[0]) & (places < self.sight[1])).long()


def texts(decoder: Decoder, tokenizer: Tokenizer, book: str, lengths: tuple[int, ...], tokens: int) -> list[Asked]:
    """Stretches of a book, the first `lengths` tokens of each to be read and `tokens` more to be foretold.

    They begin at even steps through the book, where a chapter's head may stand. Raises InputError for a book that is too short.
    """
    found = []
    for number, length in enumerate(lengths):
        start = len(book) * (2 * number + 1) // (2 * len(lengths))
        # more letters than any token has on average
        ids = tokenizer.encode(book[start : start + 8 * (length + tokens)])
        if len(ids) < length + tokens:
            raise InputError(f"the book has {len(ids)} tokens from letter {start} on, {length + tokens} are asked for", item="length")
        found.append(_of_ids(decoder, ids[: length - 1], ids[length - 1 : length], ids[length : length + tokens], "likelihood"))
    return found


def needles(decoder: Decoder, tokenizer: Tokenizer, book: str, length: int, count: int, keys: int) -> list[Asked]:
    """`count` prompts of `length` tokens, a stretch of a book with `keys` numbers hidden in it, one of which is asked for.

    Numbers have digits that are a token each. The question stands at the end of the prompt and the beginning of the answer behind it, as
    in RULER (arXiv 2404.06654); its last token is the cue. Raises InputError where they do not fit.
    """
    found = []
    for number in range(count):
        rng = np.random.default_rng((_SEED, keys, number))
        cities = [str(city) for city in rng.permutation(_CITIES)[:keys]]
        codes = {city: "".join(map(str, rng.integers(10, size=_DIGITS))) for city in cities}
        hidden = [tokenizer.encode(f"\nThe secret number of {city} is {code}.\n") for city, code in codes.items()]
        city = cities[int(rng.integers(keys))]
        said = tokenizer.encode(f"\nQuestion: What is the secret number of {city}?\nAnswer: The secret number of {city} is {codes[city]}")
        question, cue, answer = said[: -_DIGITS - 1], said[-_DIGITS - 1 : -_DIGITS], said[-_DIGITS:]
        start, room = int(rng.integers(len(book) // 2)), length - len(question) - sum(map(len, hidden))
        if room < 1:
            raise InputError(f"{keys} numbers and a question do not fit into {length} tokens", item="hidden")
        hay = tokenizer.encode(book[start : start + 8 * length])[:room]
        # the first number lies in the first tenth, the others evenly behind it
        places = [int(room * (0.05 + 0.9 * place / keys)) for place in range(keys)]
        stretches = [hay[before:after] for before, after in zip([0, *places], [*places, room], strict=True)]
        ids = [i for stretch, needle in zip(stretches, [*hidden, question], strict=True) for i in (*stretch, *needle)]
        found.append(_of_ids(decoder, ids, cue, answer, "words"))
    return found


def clip_questions(vlm: VLM, artist: Artist, count: int, slower: int) -> list[Asked]:
    """`count` questions, each about a clip of its own, drawn as those that mini is trained on and played `slower` times as slowly."""
    found = list[Asked]()
    for number in range(10 * count):
        rng = np.random.default_rng((_SEED, 2, number))
        drawn = clip(artist, rng)
        asked = [qa for qa in about_clip(drawn, rng) if qa.type in ("order", "direction", "object")]
        if asked and len(found) < count:
            qa = asked[int(rng.integers(len(asked)))]
            frames = torch.from_numpy(drawn.frames).permute(0, 3, 1, 2).repeat_interleave(slower, dim=0)
            row = _row(vlm, Video(frames, torch.arange(len(frames)).float()), qa.question)
            sight = [place for place, span in enumerate(row.spans) if span.media >= 0]
            ends = list(accumulate((span.counts[0] for span in row.spans), initial=0))
            # what ends the prompt, "Answer:", is the cue
            words = vlm.tokenizer.encode(asked_of(qa.question))[-_CUE:]
            answer = (*vlm.tokenizer.encode(f" {qa.answer}"), *sorted(vlm.stop_ids))
            prompt = row.embeddings[None, :-_CUE]
            found.append(Asked(prompt, tuple(words), answer, "whole", (ends[sight[0]], ends[sight[-1] + 1])))
    return found


def _row(vlm: VLM, video: Video, question: str) -> Row:
    laid = lay_out(vlm, Compression(), [(video, question)], 16, Clock(device_of(vlm)))
    for error in laid.errors.values():
        raise error
    (row,) = laid.rows.values()
    return row


def _of_ids(decoder: Decoder, ids: list[int], cue: list[int], answer: list[int], score: Score) -> Asked:
    prompt = decoder.embed(torch.tensor([ids], device=decoder.norm.weight.device))
    return Asked(prompt, tuple(cue), tuple(answer), score)
