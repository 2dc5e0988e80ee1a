"""What can be seen to be wrong with a command line at a glance: ports, key files, and files that are named and are not there.

`check` is called before a command is imported, which takes seconds, and nothing heavy is imported for it. What commands need of the same
once more, keys and an open port, they take from here.
"""

import argparse
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mmsdk.apps.arguments import MODEL
from mmsdk.errors import InputError
from mmsdk.named import HOW_TO_FILM, check_maker, nowhere

__all__ = ["SEEING", "USAGE", "adapters_in", "check", "check_drawn", "check_named", "keys_in", "listening", "split", "text_in"]

USAGE = 'write: mmsdk ask PATH... "question"'
SEEING = "answers about what it sees (a model that reads text alone needs no picture: --model NAME)"
PORTS = 2**16
ADAPTER = "adapter_config.json"
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def check(args: argparse.Namespace) -> None:
    """Raises InputError for what the words and flags of a command name and cannot be; most of what may be wrong is told later."""
    _CHECKS.get(args.command, _nothing)(args)


def split(words: list[str], model: str) -> tuple[list[str], str]:
    """The paths and the question of `mmsdk ask`.

    Raises InputError for a question that is a file, for paths that are not there, and where a model that sees is shown nothing.
    """
    *paths, question = words
    if os.path.isfile(question):
        raise InputError(f"the last argument is the question, and this is a file; {USAGE}", item=question)
    for path in paths:
        if not path.lower().startswith(("data:", "file:", "http:", "https:")) and not os.path.exists(path):
            raise InputError(f"there is no such file; the question comes last, as one word in quotes; {USAGE}", item=path)
    if not paths and model in MODEL.said:
        raise InputError(f"no picture or clip was named, and {model} {SEEING}; {USAGE}", item=question)
    return paths, question


def check_named(path: str) -> None:
    """Raises InputError where a word can be no picture or clip: an address, which is not fetched from here, or a file that is not there."""
    if path.lower().startswith(("http:", "https:")):
        raise InputError("addresses are not fetched from here; download it first", item=path)
    if path.lower().startswith("file:"):
        raise InputError("file: addresses are not followed from here; pass the path itself", item=path)
    if path.lower().startswith("data:"):
        return
    try:
        os.stat(path)
    except FileNotFoundError:
        raise InputError("there is no such file", item=path[:200]) from None
    except (OSError, ValueError):
        # opening it says more
        return


def check_drawn(path: Path, spared: Sequence[str | Path] = ()) -> None:
    """Raises InputError where a picture cannot be written, or would take the place of one of the `spared`; call it before the work."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path.suffix!r} names no format to draw in; there are {', '.join(ENDINGS)}", item=str(path))
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} is not there; make it first", item=str(path))
    if path.is_dir():
        raise InputError("is a folder; name a picture in it", item=str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError("cannot be written; change its rights, or name another place", item=str(path))
    if path.exists() and any(os.path.exists(other) and path.samefile(other) for other in spared):
        raise InputError("is one of the pictures that are asked about; name another place", item=str(path))


def adapters_in(texts: Sequence[str]) -> dict[str, str]:
    """The paths of adapters by their names, each written as PATH or NAME=PATH; a path's last part is its name.

    Raises InputError for two of one name, and for a path that is no folder of an adapter, nor "org/name" of one on the hub.
    """
    found = dict[str, str]()
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or "/" in name or os.sep in name:
            name, path = Path(text).name, text
        if name in found:
            raise InputError(f"two adapters are called {name!r}; write NAME=PATH", item=text)
        folder = Path(os.path.expanduser(path))
        if nowhere(path) or (folder.is_dir() and not (folder / ADAPTER).is_file()):
            why = f"it has no {ADAPTER}" if folder.is_dir() else "there is no such folder"
            raise InputError(f'{why}; an adapter is a folder that PEFT saved, or "org/name" on the hub', item=path)
        found[name] = path
    return found


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises InputError where that cannot be had."""
    _check_port(port)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"cannot listen there: {error.strerror or error}", item=f"{host}:{port}") from None


def keys_in(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line. Raises InputError where it cannot be read, or has none."""
    keys = tuple(text_in(path).split())
    if not keys:
        raise InputError("it is empty; write a key on each line", item=path)
    return keys


def text_in(path: str, what: str = "") -> str:
    """The text of a file, called `what` where it is told that it cannot be read. Raises InputError then."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{what}cannot be read: {error.strerror or error}", item=path) from None
    except ValueError as error:
        raise InputError(f"{what}cannot be read: {error}", item=path) from None


def _nothing(args: argparse.Namespace) -> None:
    pass


def _ask(args: argparse.Namespace) -> None:
    paths, _ = split(args.words, args.model)
    _shown(paths, args.schema)
    if args.explain and not paths:
        raise InputError("it draws what was looked at, and no picture or clip was named", item="--explain")
    if args.explain:
        check_drawn(Path(args.explain), paths)
    _opened(args)


def _chat(args: argparse.Namespace) -> None:
    _shown(args.words, args.schema)
    _opened(args)


def _opened(args: argparse.Namespace) -> None:
    _check_gguf(args.gguf_file, args.model)
    adapters_in(args.adapter)


def _shown(paths: list[str], schema: str | None) -> None:
    for path in paths:
        check_named(path)
    if schema is not None:
        text_in(schema, "the schema ")


def _demo(args: argparse.Namespace) -> None:
    _check_gguf(args.gguf_file, args.model)
    if args.video_model:
        check_maker(args.video_model)
    if not args.write:
        listening(args.host, args.port).close()


def _imagine(args: argparse.Namespace) -> None:
    if args.model is None:
        raise InputError(f"no video model comes with mmsdk yet: {HOW_TO_FILM}, or a folder of diffusers", item="--model")
    check_maker(args.model)


def _serve(args: argparse.Namespace) -> None:
    if args.api_key_file:
        keys_in(args.api_key_file)
    _opened(args)
    listening(args.host, args.port).close()


def _robot(args: argparse.Namespace) -> None:
    if args.action == "serve":
        _check_port(args.port)
        if args.api_key_file:
            text_in(args.api_key_file)
    if args.action in ("serve", "record"):
        _check_function(args.words[0])
    if args.action == "replay" and args.session:
        _check_function(args.session)


def _ros(args: argparse.Namespace) -> None:
    text_in(args.params)


def _check_gguf(file: str, model: str) -> None:
    """Raises InputError where a GGUF file is in no place that it is looked for in, or is none; one on the hub is left to the hub."""
    if file and model in MODEL.said:
        raise InputError(f"{model} brings its own language model; leave --gguf-file out, or name a folder as --model", item=file)
    folder = Path(model).expanduser()
    for path in [one for one in (folder / file, Path(file).expanduser()) if file and one.is_file()][:1]:
        with path.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise InputError("it is no GGUF file: it does not begin with GGUF", item=str(path))
        return
    if file and folder.is_dir():
        raise InputError(f"there is no such file, neither here nor in {folder}", item=file)


def _check_function(text: str) -> None:
    """Raises InputError where FILE.py:NAME names a file that is not there."""
    place = text.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        raise InputError("there is no such file", item=str(Path(place)))


def _check_port(port: int) -> None:
    if not 0 <= port < PORTS:
        raise InputError(f"{port} is no port; there are 0 (any free one) to {PORTS - 1}", item="port")


_CHECKS: Mapping[str, Callable[[argparse.Namespace], None]] = MappingProxyType(
    {"ask": _ask, "chat": _chat, "demo": _demo, "serve": _serve, "imagine": _imagine, "robot": _robot, "ros": _ros}
)
