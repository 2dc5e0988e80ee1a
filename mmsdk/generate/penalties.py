"""Scores of tokens that were there before, changed so that text repeats itself less, or more.

    repetition r    s / r where s is positive, else s * r, at every token of the prompt and of the answer   (CTRL, arXiv 1909.05858)
    frequency f     s - f * count, at every token of the answer                                            (OpenAI's API)
    presence p      s - p, at every token of the answer                                                    (likewise)

[published] all three, in this order: repetition as in transformers' processor, the others as in OpenAI's documentation and vLLM. Of a
prompt its words count, special tokens among them. Pictures and clips count nothing: no id stands where they are.

Letters: b rows, v words of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mmsdk.generate.config import GenerationConfig

__all__ = ["Penalties"]


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of a batch. `heard` are the tokens of its prompts, `said` how often each was said since: that changes with `count`."""

    repetition: Float[Tensor, "b 1"]
    presence: Float[Tensor, "b 1"]
    frequency: Float[Tensor, "b 1"]
    heard: Bool[Tensor, "b v"]
    said: Int[Tensor, "b v"]

    @staticmethod
    def of(configs: Sequence[GenerationConfig], prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device) -> "Penalties":
        """Of requests of which nothing was said yet; `prompts` has the ids of each prompt's words, or is empty."""
        columns = [
            torch.tensor([float(value) for value in values], device=device)[:, None]
            for values in zip(*((one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in configs), strict=True)
        ]
        heard = torch.zeros(len(configs), vocabulary, dtype=torch.bool, device=device)
        for row, prompt in zip(heard, prompts, strict=False):
            ids = torch.tensor(list(prompt), dtype=torch.int64, device=device)
            # a checkpoint may have embeddings of more ids than it can say
            row[ids[ids < vocabulary]] = True
        return Penalties(columns[0], columns[1], columns[2], heard, torch.zeros(heard.shape, dtype=torch.int32, device=device))

    def select(self, rows: Int[Tensor, " r"]) -> "Penalties":
        """A copy of these rows."""
        return Penalties(self.repetition[rows], self.presence[rows], self.frequency[rows], self.heard[rows], self.said[rows])

    def __call__(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """The scores in float32; those of a row without penalties are as they were."""
        scores, present = logits.float(), self.said > 0
        repeated = torch.where(scores < 0, scores * self.repetition, scores / self.repetition)
        scores = torch.where(self.heard | present, repeated, scores)
        return scores - self.frequency * self.said - self.presence * present

    def count(self, ids: Int[Tensor, " b"]) -> None:
        """These were said, one by each row."""
        self.said.scatter_add_(1, ids[:, None], torch.ones_like(self.said[:, :1]))
