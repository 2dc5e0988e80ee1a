"""What a flag is, what a word without one, and the flags that several commands take."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = [
    "ADAPTER",
    "COMPRESS",
    "DEVICE",
    "DTYPE",
    "FORMS",
    "GGUF_FILE",
    "HOST",
    "JSON",
    "KEYS",
    "KV",
    "MAX_TOKENS",
    "MODEL",
    "OUT",
    "PORT",
    "QUANTIZE",
    "SAMPLING",
    "SEED",
    "TEMPERATURE",
    "THREADS",
    "TICKS",
    "Flag",
    "Words",
]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, and what stands behind it: `value` names that ("" for a switch), `said` are the words that may, where these are few.

    A flag of one name takes the same in all commands, and is told in the same words: "serve: " may come in front, "; ..." behind them.
    Where none of the usual words is meant, a command says none.
    """

    name: str
    value: str
    about: str
    kind: Callable[[str], object] = str
    default: object = None
    said: tuple[str, ...] = ()
    repeated: bool = False
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Words without a flag: exactly one of `said`, or with `number` "?" one or none, with "+" one or more, with "*" any."""

    name: str
    about: str
    metavar: str = ""
    said: tuple[str, ...] = ()
    number: str = ""


JSON = Flag("--json", "", "print JSON in place of text")
MODEL = Flag(
    "--model", "NAME", 'a model: "mini", a folder, "org/name", or the GGUF file of a language model', default="mini", said=("mini",)
)
COMPRESS = Flag(
    "--compress",
    "METHOD:AMOUNT",
    'keep fewer visual tokens of each input; AMOUNT is a count of them ("uniform:64"), a share, written with a point '
    '("simplecluster:0.25"), or what a prefill has time for, in quotes ("simplecluster:auto@prefill<200ms"); knobs come behind it '
    '("random:0.25,seed=1"); given again, one works after the other; `mmsdk methods` lists them',
    repeated=True,
)
KV = Flag(
    "--kv",
    "NAME",
    "how the decoder remembers: dense, paged, int8, fp8, int4, int2, turbo4 or turbo2, or a policy of `mmsdk methods` and what it keeps of "
    'the prompt, a count of tokens ("snapkv:512") or a share ("h2o:0.25")',
    default="dense",
    said=("dense", "paged", "int8", "fp8", "int4", "int2", "turbo4", "turbo2"),
)
DTYPE = Flag(
    "--dtype",
    "NAME",
    "auto, float32, bfloat16 or float16",
    default="auto",
    said=("auto", "float32", "bfloat16", "float16"),
)
QUANTIZE = Flag(
    "--quantize",
    "NAME",
    "how the language model's matrices are stored: none, int8 or int4",
    default="none",
    said=("none", "int8", "int4"),
)
DEVICE = Flag("--device", "NAME", "cpu, cuda, cuda:1, ...", default="cpu", said=("cpu", "cuda"))
THREADS = Flag(
    "--threads",
    "N",
    "so many threads compute; 0 for one on each core, and on a machine that is busy 1 is often several times as fast",
    int,
    0,
)
GGUF_FILE = Flag("--gguf-file", "FILE", "a GGUF file, in the folder or anywhere, that the language model is read from", default="")
ADAPTER = Flag(
    "--adapter",
    "[NAME=]PATH",
    'an adapter that PEFT saved, a folder or "org/name"; given again, several: asked with all of them, served each by its name',
    repeated=True,
)
MAX_TOKENS = Flag("--max-tokens", "N", "the longest answer, in tokens", int, 128)
TEMPERATURE = Flag("--temperature", "T", "0 for the likeliest answer, more for variety", float, 0.0)
SEED = Flag("--seed", "N", "chooses one of all that may come", int, 0)
SAMPLING = (
    MAX_TOKENS,
    TEMPERATURE,
    Flag("--top-k", "N", "draw among so many of the likeliest tokens; 0 for all", int, 0),
    Flag("--top-p", "P", "draw among the likeliest tokens that make up this share", float, 1.0),
    Flag("--min-p", "P", "draw among tokens at least this many times as likely as the likeliest", float, 0.0),
    replace(SEED, about=f"{SEED.about}; where the temperature is above 0"),
    Flag("--stop", "TEXT", "end the answer before this text; may be given again", repeated=True),
    Flag("--repetition-penalty", "R", "above 1, what was asked or said becomes less likely; 1 for none", float, 1.0),
    Flag("--presence-penalty", "P", "from -2 to 2, taken from the score of what was said", float, 0.0),
    Flag("--frequency-penalty", "P", "from -2 to 2, taken from the score of what was said, as often as it was", float, 0.0),
    Flag("--max-time", "S", "end the answer after so many seconds", float, math.inf),
    Flag("--logprobs", "K", "with --json, how likely each token was, and the K likeliest in its place; 0 for none", int, 0),
    Flag("--num-beams", "K", "search for the likeliest whole answer among so many beginnings; 1 for the likeliest token each time", int, 1),
    Flag("--length-penalty", "P", "with beams, the power of its length that an answer's score is divided by", float, 1.0),
    Flag(
        "--early-stopping",
        "WHEN",
        "with beams: yes ends with as many answers as beams, no when a better one is unlikely, never when there can be none",
        default="no",
        said=("no", "yes", "never"),
    ),
)
"""How answers are drawn; see `mmsdk.generate.config.GenerationConfig`."""
FORMS = (
    Flag("--schema", "FILE", "the answer is JSON of the JSON Schema in this file"),
    Flag("--regex", "REGEX", "the answer is matched whole by this regular expression"),
    Flag("--choice", "A,B,...", "the answer is one of these"),
)
"""What form answers have; see `mmsdk.generate.constrain`."""
HOST = Flag("--host", "HOST", "the address to listen at; 0.0.0.0 lets in the whole network", default="127.0.0.1")
PORT = Flag("--port", "N", "the port to listen at; 0 takes a free one", int, 8000)
KEYS = Flag("--api-key-file", "FILE", "holds a key that clients must bring; of several, each on a line of its own, any")
OUT = Flag("--out", "PATH", "where to write")
TICKS = Flag("--ticks", "N", "how many ticks the loop runs", int, 400)
