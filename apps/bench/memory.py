"""Memories: quality, bytes and speed of every policy at five budgets, on long text, needles, long clips and streams, beside the full cache.

mmsdk bench memory --json                            some half an hour on two cores
mmsdk bench memory:quick=true                        seconds: little is asked, and it says little
mmsdk bench memory:plot=docs/images/memory.svg       draws quality against budget
mmsdk bench memory:saved=rows.jsonl                  writes each suite there when it is done, and goes on from there
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmsdk import plugins
from mmsdk.apps.console import Cell, busy, counted
from mmsdk.apps.memory.asked import Asked, clip_questions, needles, texts
from mmsdk.apps.memory.carried import carried
from mmsdk.apps.memory.lasting import TOKENS, Lasting, check_lasting
from mmsdk.apps.memory.measure import Measured, Reading, filled, measured, prompted
from mmsdk.apps.memory.plot import drawn
from mmsdk.apps.memory.rows import row
from mmsdk.apps.memory.saved import resumed
from mmsdk.apps.memory.streams import Remembering, Seen
from mmsdk.apps.train_mini.scenes import Artist
from mmsdk.compress import compression
from mmsdk.decoder.transformer import Decoder
from mmsdk.errors import InputError
from mmsdk.kv.policies.full import Full
from mmsdk.kv.policy_memory import POLICIES, policy_of
from mmsdk.models.mini.family import Mini, load
from mmsdk.models.types import Tokenizer
from mmsdk.pipeline import Pipeline
from mmsdk.precision import resolve_dtype
from mmsdk.weights.bundle import pull
from mmsdk.weights.quantised import gguf_decoder

__all__ = ["Memory"]

BUDGETS = (0.5, 0.25, 0.1, 0.05, 0.025)
# At this one santa reads the 16 to 22 % of which its paper speaks.
_SPOKEN_OF = {"santa": 0.15}


@dataclass(frozen=True, slots=True)
class Memory:
    """`suites` and `policies` are names joined by "+", or "all". `quick` asks little of everything, in seconds.

    text: `texts` stretches of a novel on SmolLM2, the last of `longest` tokens, the others shorter, and `tokens` foretold behind each.
    needle: `needles` prompts of `hidden` tokens with one number to be found, and as many with eight. clip: `clips` questions about clips
    of 8 `slower` frames, on mini. stream: `streams` of `frames` frames, which begin with `events` shapes that are shown for eight frames
    each, and `forever` streams of `endless` frames, of which `hold` tokens are held; each shape is asked for its colour and its place.
    `window` is that of a text that is compacted over and over. `saved` is a file for the rows of suites that are done.
    """

    suites: str = "all"
    policies: str = "all"
    texts: int = 2
    longest: int = 7936
    tokens: int = 16
    needles: int = 6
    hidden: int = 2048
    clips: int = 12
    slower: int = 3
    streams: int = 8
    events: int = 4
    frames: int = 64
    forever: int = 2
    endless: int = 10_000
    hold: int = 256
    window: int = 1024
    dtype: str = "auto"
    plot: str = ""
    saved: str = ""
    quick: bool = False

    def __call__(self) -> list[dict[str, Cell]]:
        """Rows {suite, policy, budget, quality, quality_full, bytes_held, bytes_read_per_token, tok_s, frames, n, ci_low, ci_high, ...}.

        Quality is the geometric mean of the probability of the next token for text, and the share of right digits or answers for the other
        suites; `quality_full` is that of the full cache. `budget` is the share of the prompt or stream that is held, or read, and `frames`
        how many a stream had. Of a stream the last token read what was held and its whole window (`bytes_read_per_token`), before as much
        went again (`bytes_held`). Of streams also: of how many answers (`n`), a 95 % interval of their share (`ci_low`, `ci_high`), and,
        question by question, how many are `better` and `worse` than the best sliding window's (`against`), with the sign test's `p`. With
        `quick` all sizes are small whatever is said. Raises InputError for sizes and names that cannot be.
        """
        if self.quick:
            small = dataclasses.replace(self, texts=1, longest=192, tokens=4, needles=1, hidden=384, clips=1, slower=1, streams=1)
            return dataclasses.replace(small, events=1, frames=16, forever=1, endless=64, hold=64, window=264, quick=False)()
        for name in ("texts", "tokens", "needles", "clips", "slower", "streams", "events", "forever"):
            if getattr(self, name) < 1:
                raise InputError(f"it is {getattr(self, name)}, it must be at least 1", item=name)
        check_lasting(self.events, self.frames, self.endless)
        self._policies()
        suites = _chosen(self.suites, ["text", "needle", "clip", "stream"], "suites")
        settings = repr(dataclasses.replace(self, suites="all", plot="", saved=""))
        if self.saved:
            rows = resumed(Path(self.saved), settings, suites, self._suite)
        else:
            rows = [row for suite in suites for row in self._suite(suite)]
        if self.plot:
            Path(self.plot).write_text(drawn(rows), encoding="utf-8")
        return rows

    def _suite(self, suite: str) -> Iterator[dict[str, Cell]]:
        """SmolLM2 is asked about words, mini about what is seen."""
        dtype, cpu = resolve_dtype(self.dtype, torch.device("cpu")), torch.device("cpu")
        if suite in ("text", "needle"):
            decoder, tokenizer = gguf_decoder(pull("mini")["language"], dtype, "none")
            book = pull("books")["moby-dick"].read_text(encoding="utf-8")
            return self._texts(decoder, tokenizer, book) if suite == "text" else self._needles(decoder, tokenizer, book)
        vlm, artist = load("mini", None, dtype, cpu), Artist(pull("emoji")["images"], pull("photos")["images"], held_out=True)
        return self._clips(vlm, artist) if suite == "clip" else self._streams(vlm, artist)

    def _texts(self, decoder: Decoder, tokenizer: Tokenizer, book: str) -> Iterator[dict[str, Cell]]:
        lengths = tuple(self.longest >> 2 * (self.texts - 1 - number) for number in range(self.texts))
        yield from self._rows("text", decoder, texts(decoder, tokenizer, book, lengths, self.tokens))
        ids = tokenizer.encode(book[: 8 * self.longest])[: self.longest]
        for anew in counted("compacting", (True, False)):
            one = carried(decoder, ids, self.window, anew)
            name, speed = "re-prefill" if anew else "kv-streams", len(ids) / one.seconds
            yield row("text", name, self.window / len(ids), (one.quality, None), one.held, one.held, speed)

    def _needles(self, decoder: Decoder, tokenizer: Tokenizer, book: str) -> Iterator[dict[str, Cell]]:
        asked = [one for keys in (1, 8) for one in needles(decoder, tokenizer, book, self.hidden, self.needles, keys)]
        yield from self._rows("needle", decoder, asked)

    def _clips(self, vlm: Mini, artist: Artist) -> Iterator[dict[str, Cell]]:
        yield from self._rows("clip", vlm.decoder, clip_questions(vlm, artist, self.clips, self.slower))

    def _rows(self, suite: str, decoder: Decoder, asked: Sequence[Asked]) -> Iterator[dict[str, Cell]]:
        """A row for each policy and budget, and one for the full cache; each prompt is read once for all of them."""
        wanted = [("full", Full(), (1.0,)), *((name, policy_of(f"{name}:1.0").policy, _budgets(name)) for name in self._policies())]
        found: dict[tuple[str, float], list[Reading]] = {(name, budget): [] for name, _, budgets in wanted for budget in budgets}
        for number, one in enumerate(asked, 1):
            with busy(f"{suite} {number}/{len(asked)}: reading"):
                prompt = prompted(decoder, one)
            for name, policy, budgets in counted(f"{suite} {number}/{len(asked)}", wanted):
                for budget, cache in zip(budgets, filled(policy, budgets, prompt), strict=True):
                    found[name, budget].append(measured(decoder, cache, one))
        means = {key: Measured.of(readings) for key, readings in found.items()}
        full = means["full", 1.0].quality
        for (name, budget), mean in means.items():
            yield row(suite, name, budget, (mean.quality, full), mean.held, mean.read, mean.tok_s)

    def _streams(self, vlm: Mini, artist: Artist) -> Iterator[dict[str, Cell]]:
        """Every window of frames is looked at once, for all memories."""
        pipe = Pipeline(Seen(vlm, Remembering(vlm.encoder)), compression(f"simplecluster:{TOKENS}"))
        lasting = Lasting(pipe, vlm.decoder, artist, self.streams, self.events, self.frames, self.forever, self.endless, self.hold)
        yield from lasting.rows(self._policies())
        yield from lasting.going_on()

    def _policies(self) -> list[str]:
        known = [name for name in plugins.available(POLICIES) if name != "full"]
        return _chosen(self.policies, sorted(known, key=lambda name: (name not in ("window", "streaming"), name)), "policies")


def _budgets(name: str) -> tuple[float, ...]:
    """Those of all, and the one at which a policy's paper gives its numbers, from large to small."""
    return tuple(sorted({*BUDGETS, *(at for spoken, at in _SPOKEN_OF.items() if spoken == name)}, reverse=True))


def _chosen(text: str, known: Sequence[str], item: str) -> list[str]:
    """Names out of "a+b", in the order of those that are known. Raises InputError for another."""
    asked = list(known) if text == "all" else text.split("+")
    for name in asked:
        if name not in known:
            raise InputError(f"{name!r} is not known; join some of {', '.join(known)} by +, or write all", item=item)
    return [name for name in known if name in asked]
