"""What may be said on the command line, as data: every command with its words and flags. A flag means one thing wherever it stands.

`parser` makes argparse's parser of it, `mmsdk completion` the scripts of shells. Nothing heavy is imported, so that help comes at once.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from mmsdk import __version__

__all__ = ["COMMANDS", "Command", "Flag", "Parser", "UsageError", "Words", "near", "parser"]


class UsageError(Exception):
    """The command line itself cannot be understood."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, and what stands behind it: `value` names that ("" for a switch), `said` are the words that may, where these are few.

    A flag of one name takes the same in all commands, and is told in the same words: "serve: " may come in front, "; ..." behind them.
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


@dataclass(frozen=True, slots=True)
class Command:
    """A command in one line, and what may be said to it. `usage` is for words that argparse would tell in another way.

    `short` are a flag and the first word that it stands for: with ("--env", "play"), `robot --env NAME` is `robot play NAME`.
    """

    about: str
    flags: tuple[Flag, ...]
    words: tuple[Words, ...] = ()
    usage: str = ""
    short: tuple[str, str] = ("", "")


JSON = Flag("--json", "", "print JSON in place of text")
MODEL = Flag("--model", "NAME", 'a model: "mini", a folder, or "org/name"', default="mini", said=("mini",))
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


def _for(action: str, flag: Flag) -> Flag:
    return replace(flag, about=f"{action}: {flag.about}")


ASK = Command(
    "ask about pictures or clips",
    (
        MODEL,
        *SAMPLING,
        Flag("--n", "N", "so many answers, with the seeds from --seed on; the question is read once", int, 1),
        COMPRESS,
        KV,
        DTYPE,
        QUANTIZE,
        GGUF_FILE,
        ADAPTER,
        DEVICE,
        *FORMS,
        Flag("--explain", "PICTURE", "draw what was looked at into this file (.png, .jpg, ...)"),
        JSON,
    ),
    (Words("words", "one or more pictures or clips, then the question", 'PATH... "question"', number="+"),),
    'mmsdk ask PATH... "question" [options]',
)

CHAT = Command(
    "talk about pictures and clips, line by line",
    (
        MODEL,
        *SAMPLING,
        Flag("--system", "TEXT", "what the model is told before the conversation", default=""),
        COMPRESS,
        KV,
        DTYPE,
        QUANTIZE,
        GGUF_FILE,
        ADAPTER,
        DEVICE,
        *FORMS,
        replace(JSON, about=f"{JSON.about}; one object a line"),
    ),
    (Words("words", "pictures and clips that the first question is about", "PATH...", number="*"),),
    "mmsdk chat [PATH...] [options]",
)

IMAGINE = Command(
    "make a clip of a sentence",
    (
        replace(MODEL, about=f"{MODEL.about}; here a folder that `python -m mmsdk.apps.train_video` wrote, or one of diffusers"),
        replace(OUT, about=f"{OUT.about}; a .mp4, a .gif, or a .png of all frames", default="clip.mp4"),
        SEED,
        Flag("--steps", "N", "steps from noise to the clip, without it the model's own", int),
        Flag(
            "--guidance",
            "G",
            "how far to go towards the sentence; 1 is no further than it says, without one the model's own",
            float,
        ),
        Flag("--against", "TEXT", "what guidance goes away from", default=""),
        Flag("--coarse", "N", "so many of the first steps at half the size, which is several times as fast", int, 0),
        Flag("--attention", "METHOD", 'dense, or a sparse attention of `mmsdk methods` with its knobs ("svg2:mass=0.9")', default="dense"),
        Flag("--cache", "METHOD", 'none, or a step cache with its first knob ("first_block:0.05")', default="none"),
        Flag("--length", "N", "frames of the clip; 0 for the model's own", int, 0),
        Flag("--height", "N", "rows of pixels; 0 for the model's own", int, 0),
        Flag("--width", "N", "columns of pixels; 0 for the model's own", int, 0),
        DTYPE,
        DEVICE,
        JSON,
    ),
    (Words("text", "the sentence, in quotes", '"text"'),),
    'mmsdk imagine "text" [options]',
)

DEMO = Command(
    "a page in the browser: pictures, clips, a robot, the benches",
    (
        MODEL,
        replace(KV, about=f"{KV.about}; chosen at first"),
        DTYPE,
        replace(QUANTIZE, about=f"{QUANTIZE.about}; chosen at first"),
        GGUF_FILE,
        DEVICE,
        HOST,
        replace(PORT, default=7860),
        Flag("--video-model", "FOLDER", "a model that makes clips, for a tab of its own; see `mmsdk imagine`", default=""),
        Flag("--max-upload-mb", "MB", "the largest upload", int, 64),
        Flag("--share", "", "ask for a public address, too, which Gradio's own server gives"),
        Flag("--write", "", "no page: answer about three pictures and a clip, and write annotated pictures"),
        replace(OUT, about=f"{OUT.about}; with --write, a folder for annotated pictures", default="demo"),
        JSON,
    ),
)

SERVE = Command(
    "serve a model to clients of OpenAI's API",
    (
        MODEL,
        Flag("--name", "NAME", "what clients call the model; without it, what it is called here"),
        COMPRESS,
        replace(KV, about=f"{KV.about}; dense is paged here", default="paged"),
        DTYPE,
        QUANTIZE,
        GGUF_FILE,
        ADAPTER,
        DEVICE,
        HOST,
        PORT,
        KEYS,
        Flag(
            "--allow-host",
            "HOST",
            'a host that pictures and clips are fetched from: "images.example.org", "*.example.org"',
            repeated=True,
        ),
        Flag("--allow-network", "NETWORK", "a private network that such a host may be in: 10.1.0.0/16", repeated=True),
        Flag("--allow-origin", "ORIGIN", "a web page whose scripts may ask: https://chat.example.org", repeated=True),
        Flag("--rows", "N", "requests that are answered at one time", int, 8),
        Flag("--waiting", "N", "requests that may wait beside them", int, 24),
        Flag("--pool", "N", "tokens that are remembered of all of them together; 0 for 1,024 each and a whole context", int, 0),
        Flag("--max-body-mb", "MB", "the largest request", int, 32),
        Flag("--max-media", "N", "pictures and clips of a request", int, 16),
        Flag("--max-pixels", "N", "pixels of all of them together, once decoded", int, 2**25),
        Flag("--frames", "N", "frames that are taken of a clip", int, 8),
        replace(MAX_TOKENS, about=f"{MAX_TOKENS.about}; a request may ask for less", default=1024),
        Flag("--timeout", "S", "the longest time that a request may take", float, 300.0),
        Flag("--body-timeout", "S", "how long a request may take to come in", float, 30.0),
        Flag("--form-timeout", "S", "how long the form of an answer may take to be compiled", float, 10.0),
        Flag("--grace", "S", "how long what runs may take to finish when the server ends", float, 60.0),
        replace(JSON, about=f"{JSON.about}; one object when the server is ready"),
    ),
)

ROBOT = Command(
    "run the default policy in simulation, serve policies to robots, record and replay what they did",
    (
        Flag("--env", "NAME", "play: the simulated task, metaworld/drawer-open-v3; `robot --env NAME` is `robot play NAME`"),
        Flag("--episodes", "N", "play: so many episodes, none of which was trained on", int, 5),
        Flag("--gif", "FILE", "play: a picture that moves of the first episode"),
        _for("play", COMPRESS),
        _for("serve", HOST),
        _for("serve", PORT),
        _for("serve", KEYS),
        _for("record, export", replace(OUT, about=f"{OUT.about}; a folder")),
        _for("record", TICKS),
        Flag("--session", "FILE.py:NAME", "replay: whose kinematics, and policy, are taken"),
        Flag("--ask", "", "replay: ask that policy again"),
        Flag("--pictures", "", "export: pictures as they are, in place of videos"),
        JSON,
    ),
    (
        Words(
            "action",
            "play episodes of a simulated task; serve a policy over a websocket until Ctrl-C; record a loop, replay a recording, export "
            "recordings as a data set",
            said=("play", "serve", "record", "replay", "export"),
        ),
        Words("words", "play: a task; serve, record: FILE.py:NAME; replay, export: folders of recordings", "WHAT", number="+"),
    ),
    short=("--env", "play"),
)

ROS = Command(
    "run a policy as a ROS 2 node",
    (
        Flag("--params", "FILE", "the parameter file that says which robot, policy and topics", needed=True),
        Flag("--node", "NAME", "the node's full name, which the file speaks of", default="/policy"),
        replace(TICKS, about=f"{TICKS.about}; 0 for no end", default=0),
        Flag("--record", "FOLDER", "run: record what the loop is told, as `mmsdk robot record` does"),
        Flag("--seconds", "S", "how long the simulated arm is there; 0 for no end", float, 0.0),
        JSON,
    ),
    (Words("action", "run a policy as a node, or an arm in place of the robot, until Ctrl-C", said=("run", "simulate")),),
)

METHODS = Command("list the methods that can be chosen by name", (JSON,))

DOCTOR = Command("look at this machine: what it can run and how fast, and what is missing", (JSON,))

WEIGHTS = Command(
    "fetch, list or verify model weights",
    (JSON,),
    (
        Words("action", "pull fetches, list shows, verify hashes", said=("pull", "list", "verify")),
        Words("name", "a bundle (default: mini for pull, all for list and verify)", "NAME", number="?"),
    ),
)

BENCH = Command(
    "run a benchmark, or print the result kept of one",
    (
        JSON,
        Flag("--committed", "", "print the result kept in the repository instead of running"),
        Flag("--compile-only", "", "for the bench of kernels: compile them and run none"),
    ),
    (Words("name", 'a bench, with knobs as in "startup:repeats=3"; none lists them', "NAME", number="?"),),
)

COMPLETION = Command(
    "print a script that completes commands in a shell",
    (JSON,),
    (Words("shell", 'the shell: eval "$(mmsdk completion bash)" in ~/.bashrc', said=("bash", "zsh", "fish")),),
)

# In the order of the help, and under the name of the module of `mmsdk.apps.commands` that runs it.
COMMANDS = {
    "ask": ASK,
    "chat": CHAT,
    "imagine": IMAGINE,
    "demo": DEMO,
    "serve": SERVE,
    "robot": ROBOT,
    "ros": ROS,
    "methods": METHODS,
    "doctor": DOCTOR,
    "weights": WEIGHTS,
    "bench": BENCH,
    "completion": COMPLETION,
}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of leaving, and says what is near. `short` is as in `Command`.

    Behind one of its `actions`, help shows what can be said to that one.
    """

    short: tuple[str, str] = ("", "")
    actions: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, where the short form was spelt out."""
        flag, word = self.short
        words = _spelt_out(list(args), flag, word) if flag and args else args
        if words and words[0] in self.actions and not {"-h", "--help"}.isdisjoint(words):
            self._show_only(words[0])
        return super().parse_known_args(words, namespace)

    def _show_only(self, word: str) -> None:
        """Leave out of the help what belongs to other actions, and the word in front of what belongs to this one."""
        for one in self._actions:
            owners, colon, about = (one.help or "").partition(": ")
            if one.option_strings and colon and set(owners.split(", ")) <= set(self.actions):
                one.help = about if word in owners.split(", ") else argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        if wrong and "command" in message:
            raise UsageError(f"there is no command {wrong[1]!r}{near(wrong[1], list(COMMANDS))}")
        raise UsageError(f"{message}; `{self.prog} --help` shows what can be said")


def parser() -> Parser:
    """The parser of `mmsdk`; what it finds has `command`, and that command's words and flags."""
    made = Parser(prog="mmsdk", description="Ask a vision-language model about pictures and clips.", allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"mmsdk {__version__}")
    commands = made.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    for name, command in COMMANDS.items():
        under = commands.add_parser(name, help=command.about, allow_abbrev=False)
        under.usage, under.short = command.usage or None, command.short
        for words in command.words:
            under.actions = words.said if words.name == "action" else under.actions
            _add_words(under, words)
        for flag in command.flags:
            _add_flag(under, flag)
    return made


def near(word: str, known: Sequence[str]) -> str:
    """The end of a message about a word that is not known: what was meant, or all that there is."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _spelt_out(args: list[str], flag: str, word: str) -> list[str]:
    """The value of the flag as the word after the first one, which is put there where it is missing."""
    place = next((i for i, arg in enumerate(args) if arg == flag or arg.startswith(f"{flag}=")), -1)
    if place < 0 or args[place:] == [flag]:
        return args
    joined = args[place] != flag
    value = args[place].partition("=")[2] if joined else args[place + 1]
    others = args[:place] + args[place + (1 if joined else 2) :]
    return [word, value, *(others[1:] if others[:1] == [word] else others)]


def _add_words(under: Parser, words: Words) -> None:
    under.add_argument(words.name, help=words.about, metavar=words.metavar or None, choices=words.said or None, nargs=words.number or None)


def _add_flag(under: Parser, flag: Flag) -> None:
    if not flag.value:
        under.add_argument(flag.name, action="store_true", help=flag.about)
    elif flag.repeated:
        under.add_argument(flag.name, metavar=flag.value, action="append", default=[], help=flag.about)
    else:
        told = flag.about if flag.default is None else f"{flag.about} (default: {flag.default})"
        under.add_argument(flag.name, metavar=flag.value, type=flag.kind, default=flag.default, required=flag.needed, help=told)
