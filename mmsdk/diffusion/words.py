"""Text of few words for a small model: a learned row for each word of its vocabulary, and one for each place in the text."""

import difflib
import re
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from mmsdk.diffusion.types import Condition
from mmsdk.errors import InputError

__all__ = ["Words"]


class Words(nn.Module):
    """Embeds texts of at most `length` words. No text at all is one, too: what guidance goes away from."""

    def __init__(self, vocabulary: Sequence[str], width: int, length: int) -> None:
        super().__init__()
        self.vocabulary, self.length = tuple(vocabulary), length
        # row 0 stands where there is no word
        self.table = nn.Embedding(len(self.vocabulary) + 1, width)
        self.places = nn.Parameter(torch.randn(length, width))

    def numbers(self, texts: Sequence[str]) -> Int[Tensor, "b t"]:
        """The row of each word. Raises InputError for words that it was not taught, saying what is near, and for a text too long."""
        rows = [self._row(text, index if len(texts) > 1 else None) for index, text in enumerate(texts)]
        return torch.tensor(rows, device=self.places.device)

    def forward(self, numbers: Int[Tensor, "b t"]) -> Condition:
        """What a model is conditioned on, words in their places."""
        return Condition(self.table(numbers) + self.places)

    def _row(self, text: str, index: int | None) -> list[int]:
        words = re.findall(r"[\w'-]+", text.lower())
        for word in words:
            if word not in self.vocabulary:
                near = difflib.get_close_matches(word, self.vocabulary, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                told = f"the model knows few words, and {word!r} is none of them; {hint}It knows: {' '.join(self.vocabulary)}"
                raise InputError(told, item=text, index=index)
        if len(words) > self.length:
            raise InputError(f"it has {len(words)} words; the model reads {self.length}", item=text, index=index)
        return [*(self.vocabulary.index(word) + 1 for word in words), *[0] * (self.length - len(words))]
