"""The two cards of the tab of pictures: an answer by the chosen method and one from every token, each with what it cost."""

import html
from dataclasses import dataclass

from mmsdk.answer import Answer
from mmsdk.apps.web import markup
from mmsdk.apps.web.looking import Choice, Said
from mmsdk.apps.web.models import Models, weight_megabytes
from mmsdk.vision.intake import ANIMATED

__all__ = ["Card", "unasked"]

MOVING = "the first of several frames; the tab of clips reads them all"


@dataclass(frozen=True, slots=True)
class Card:
    """One of the two answers."""

    models: Models
    choice: Choice

    def writing(self, said: Said) -> str:
        """While words come."""
        return markup.card(self._title, self._tag, said.text, writing=True, chosen=self._chosen)

    def waiting(self, wanted: bool) -> str:
        """Before that, or where it is not wanted."""
        return markup.card(self._title, "comes next" if wanted else "not asked for", "", chosen=False)

    def unfinished(self, said: Said) -> str:
        """Where it was stopped."""
        return markup.card(self._title, "stopped", said.text, chosen=self._chosen)

    def done(self, said: Said, other: Said) -> str:
        """With what it cost, on one scale with the other answer."""
        assert said.answer is not None and other.answer is not None, "both are whole"
        below = markup.facts(self._facts(said, said.answer)) + _stages(
            said.answer, max(said.answer.timings.total, other.answer.timings.total)
        )
        told = [MOVING if note == ANIMATED else note for sight in said.answer.sights for note in sight.notes]
        notes = "".join(f'<p class="mm-note">{html.escape(note)}</p>' for note in told)
        return markup.card(self._title, self._tag, str(said.answer), below + notes, chosen=self._chosen)

    def _facts(self, said: Said, answer: Answer) -> list[markup.Fact]:
        tokens, times = answer.tokens, answer.timings
        recalled = f" · {tokens.recalled} known" if tokens.recalled else ""
        held = weight_megabytes(self.models.begin(self.choice.weights).result())
        return [
            markup.Fact("visual tokens", markup.number(tokens.kept), f"of {tokens.visual:,}"),
            markup.Fact("prompt", markup.number(tokens.prompt), f"tokens{recalled}"),
            markup.Fact("first token after", markup.number(times.total - times.decode), "ms"),
            markup.Fact("whole answer", markup.number(times.total), f"ms · {tokens.generated} tokens"),
            markup.Fact("keys and values", markup.number(said.megabytes), "MB"),
            markup.Fact("weights", markup.number(held), f"MB · {answer.precision}"),
        ]

    @property
    def _chosen(self) -> bool:
        return self.choice.method != "identity"

    @property
    def _title(self) -> str:
        return self.choice.method if self._chosen else "every token"

    @property
    def _tag(self) -> str:
        return f"{self.choice.share:.0f} %" if self._chosen else "100 %"


def unasked(method: str, share: int | float) -> tuple[str, str]:
    """The two cards before anything is asked."""
    return markup.card(method, f"{share:.0f} %", "", chosen=True), markup.card("every token", "100 %", "")


def _stages(answer: Answer, whole: float) -> str:
    times = answer.timings
    named = {"encode": times.load + times.encode, "compress": times.compress, "prefill": times.prefill, "decode": times.decode}
    return markup.bar([markup.Segment(name, ms, f"{markup.number(ms)} ms") for name, ms in named.items()], whole)
