"""Which token comes next: the most likely one, or a draw from the distribution that a request's settings leave.

Every request draws from a `torch.Generator` of its own, and as many numbers per token whatever the others do, so that its tokens do
not depend on the batch it is in. A draw is the argmax of log-probabilities plus Gumbel noise (Gumbel 1954; the same trick as in
`torch.multinomial`): rounding that differs between batch sizes changes it only where two tokens nearly tie. Where Triton runs, filters and
draw are one kernel (`mmsdk.kernels.ops.sample`), which takes one number a token; it leaves the same tokens, with the same probabilities.

Letters: b rows, v words of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mmsdk.decoder.launch import launches
from mmsdk.generate.config import GenerationConfig
from mmsdk.generate.penalties import Penalties
from mmsdk.kernels.ops.sample import sample

__all__ = ["Sampler", "admissible", "likeliest"]

_SINGLE = torch.finfo(torch.float32)
# Words whose largest score is found in one sweep of vectors.
_BLOCK = 256


def likeliest(logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
    """The word of the largest score of each row, the first of equals; what is no number counts as the largest.

    As argmax, which on a processor goes number by number: there first the best block of words is found, then the word.
    """
    if logits.device.type != "cpu" or logits.shape[-1] % _BLOCK:
        return logits.argmax(-1)
    blocks = logits.unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(-1).argmax(-1)
    found: Tensor = best * _BLOCK + blocks[torch.arange(len(best)), best].argmax(-1)
    return found


@dataclass(frozen=True, slots=True)
class Sampler:
    """The settings of a batch as tensors on its device, and one generator a row (none where the whole batch is greedy).

    `penalties` are there, once, where a row has any.
    """

    temperature: Float[Tensor, "b 1"]
    top_k: Int[Tensor, "b 1"]
    top_p: Float[Tensor, "b 1"]
    min_p: Float[Tensor, "b 1"]
    ranked: bool
    generators: tuple[torch.Generator, ...]
    penalties: tuple[Penalties, ...] = ()

    @staticmethod
    def of(
        configs: Sequence[GenerationConfig], device: torch.device, vocabulary: int = 0, prompts: Sequence[Sequence[int]] = ()
    ) -> "Sampler":
        """A sampler at the start of these requests: its generators are fresh from their seeds.

        Penalties need to know how many words the vocabulary has, and the ids of the words of every prompt.
        """

        def column(values: Sequence[int | float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        drawn, penalised = any(config.temperature > 0 for config in configs), any(config.penalised for config in configs)
        return Sampler(
            temperature=column([_single(config.temperature) for config in configs], torch.float32),
            top_k=column([int(config.top_k) for config in configs], torch.int64),
            top_p=column([float(config.top_p) for config in configs], torch.float32),
            min_p=column([float(config.min_p) for config in configs], torch.float32),
            ranked=any(config.top_k > 0 or config.top_p < 1 for config in configs),
            generators=tuple(torch.Generator(device).manual_seed(int(config.seed)) for config in configs) if drawn else (),
            penalties=(Penalties.of(configs, prompts, vocabulary, device),) if penalised else (),
        )

    def select(self, rows: Sequence[int]) -> "Sampler":
        """These rows alone, from where they are."""
        index = torch.tensor(rows, device=self.temperature.device)
        columns = self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        generators = tuple(self.generators[row] for row in rows) if self.generators else ()
        return Sampler(*columns, self.ranked, generators, tuple(one.select(index) for one in self.penalties))

    def __call__(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        """The next token of every row; advances the generators, and counts what is said."""
        for penalties in self.penalties:
            logits = penalties(logits)
        ids = self._drawn(logits)
        for penalties in self.penalties:
            penalties.count(ids)
        return ids

    def _drawn(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        best = likeliest(logits)
        if not self.generators:
            return best
        if launches(logits):
            uniform = torch.cat([torch.rand(1, generator=generator, device=generator.device) for generator in self.generators])
            columns = self.temperature[:, 0], self.top_k[:, 0], self.top_p[:, 0], self.min_p[:, 0]
            return sample(logits, *columns, uniform)
        greedy = self.temperature == 0
        # From the best token down, so that the smallest temperature makes the others unlikely, and not all of them infinite. A greedy row
        # takes any temperature: what is drawn for it is not looked at.
        below = logits.float() - logits.amax(-1, keepdim=True)
        scaled = below / torch.where(greedy, 1.0, self.temperature)
        scores = admissible(scaled, self.top_k, self.top_p, self.min_p) if self.ranked else _above(scaled, self.min_p)
        drawn = (scores + self._noise(logits.shape[-1])).argmax(-1)
        return torch.where(greedy[:, 0], best, drawn)

    def _noise(self, v: int) -> Float[Tensor, "b v"]:
        uniform = torch.stack([torch.rand(v, generator=generator, device=generator.device) for generator in self.generators])
        # A zero is drawn once in some ten million, and would take its token out for good.
        return -torch.log(-torch.log(uniform.clamp_min(_SINGLE.tiny)))


def _single(temperature: int | float) -> float:
    """The temperature as float32 holds it: 0 only where it is 0, and never infinite."""
    return max(float(min(temperature, _SINGLE.max)), _SINGLE.tiny) if temperature > 0 else 0.0


def admissible(
    scores: Float[Tensor, "b v"], top_k: Int[Tensor, "b 1"], top_p: Float[Tensor, "b 1"], min_p: Float[Tensor, "b 1"]
) -> Float[Tensor, "b v"]:
    """The scores with -inf wherever a setting takes a token out; the most likely token always stays.

    In this order: the `top_k` highest (0 means all; ties go to the lower id), then the fewest whose probability reaches `top_p`
    (nucleus sampling, arXiv 1904.09751), then those at least `min_p` times as likely as the most likely (arXiv 2407.01082).
    """
    ranked, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    kept = (rank < top_k) | (top_k == 0)
    share = ranked.masked_fill(~kept, -torch.inf).softmax(-1)
    # Rounding can bring the sum to 1 before the last token: top_p 1 must not read that as "enough".
    kept &= (share.cumsum(-1) - share < top_p) | (top_p >= 1)
    kept[:, 0] = True
    mask = torch.zeros_like(kept).scatter(-1, order, kept)
    return _above(scores.masked_fill(~mask, -torch.inf), min_p)


def _above(scores: Float[Tensor, "b v"], min_p: Float[Tensor, "b 1"]) -> Float[Tensor, "b v"]:
    floor = scores.amax(-1, keepdim=True) + torch.log(min_p)
    return scores.masked_fill(scores < floor, -torch.inf)
