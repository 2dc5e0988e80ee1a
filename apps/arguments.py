"""What may be said on the command line, as data: every command with its words and flags. A flag means one thing wherever it stands.

`mmsdk.apps.parser` makes argparse's parser of it, `mmsdk completion` the scripts of shells. Nothing heavy is imported: help comes at once.
"""

from dataclasses import dataclass, replace

from mmsdk.apps.flags import (
    ADAPTER,
    COMPRESS,
    DEVICE,
    DTYPE,
    FORMS,
    GGUF_FILE,
    HOST,
    JSON,
    KEYS,
    KV,
    MAX_TOKENS,
    MODEL,
    OUT,
    PORT,
    QUANTIZE,
    SAMPLING,
    SEED,
    THREADS,
    TICKS,
    Flag,
    Words,
)

__all__ = ["COMMANDS", "MODEL", "Command"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command in one line, and what may be said to it. `usage` is for words that argparse would tell in another way.

    `short` are a flag and the first word that it stands for: with ("--env", "play"), `robot --env NAME` is `robot play NAME`. `actions` are
    first words of which each has a help of its own, with the words behind it.
    """

    about: str
    flags: tuple[Flag, ...]
    words: tuple[Words, ...] = ()
    usage: str = ""
    short: tuple[str, str] = ("", "")
    actions: tuple[tuple[str, str], ...] = ()


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
        THREADS,
        *FORMS,
        Flag("--explain", "PICTURE", "draw what was looked at into this file (.png, .jpg, ...)"),
        JSON,
    ),
    (
        Words(
            "words",
            "pictures and clips, none only for a model that reads text alone, then the question",
            '[PATH ...] "question"',
            number="+",
        ),
    ),
    'mmsdk ask [PATH ...] "question" [options]',
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
        THREADS,
        *FORMS,
        replace(JSON, about=f"{JSON.about}; one object a line"),
    ),
    (Words("words", "pictures and clips that the first question is about", "PATH...", number="*"),),
    "mmsdk chat [PATH...] [options]",
)

IMAGINE = Command(
    "make a clip of a sentence",
    (
        replace(
            MODEL,
            about=f"{MODEL.about}; here a folder that `python -m mmsdk.apps.train_video` wrote, or one of diffusers: none ships with mmsdk",
            default=None,
            said=(),
        ),
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
        Flag("--cache", "METHOD", 'none, or a step cache of `mmsdk methods` with its first knob ("first_block:0.05")', default="none"),
        Flag("--length", "N", "frames of the clip; 0 for the model's own", int, 0),
        Flag("--height", "N", "rows of pixels; 0 for the model's own", int, 0),
        Flag("--width", "N", "columns of pixels; 0 for the model's own", int, 0),
        DTYPE,
        DEVICE,
        THREADS,
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
        THREADS,
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
        THREADS,
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
            "play episodes of a simulated task; serve a policy over a websocket until Ctrl-C; record a loop; replay a recording; export "
            "recordings as a data set",
            said=("play", "serve", "record", "replay", "export"),
        ),
        Words("words", "play: a task; serve, record: FILE.py:NAME; replay, export: folders of recordings", "WHAT", number="+"),
    ),
    short=("--env", "play"),
    actions=(
        ("play", "TASK"),
        ("serve", "FILE.py:NAME"),
        ("record", "FILE.py:NAME"),
        ("replay", "FOLDER..."),
        ("export", "FOLDER..."),
    ),
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
        THREADS,
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
