"""The parser of the command line: `mmsdk.apps.arguments` as argparse reads it, short forms spelt out, and what is near told."""

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from mmsdk import __version__
from mmsdk.apps.arguments import COMMANDS
from mmsdk.apps.flags import Flag, Words
from mmsdk.plugins import nearest

__all__ = ["Parser", "UsageError", "near", "parser"]


class UsageError(Exception):
    """The command line itself cannot be understood."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of leaving, and says what is near. `short` is as in `Command`.

    Behind one of its `actions`, help shows what can be said to that one; `behind` are the words that belong behind each.
    """

    short: tuple[str, str] = ("", "")
    actions: tuple[str, ...] = ()
    behind: tuple[tuple[str, str], ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, where the short form was spelt out."""
        flag, word = self.short
        words = _spelt_out(list(args), flag, word) if flag and args else args
        if words and words[0] in self.actions and not {"-h", "--help"}.isdisjoint(words):
            self._show_only(words[0])
        return super().parse_known_args(words, namespace)

    def _show_only(self, word: str) -> None:
        """Leave out of the help what belongs to other actions, and the word in front of what belongs to this one."""
        for words in (words for name, words in self.behind if name == word):
            self._tell_use(word, words)
        for one in self._actions:
            owners, colon, about = (one.help or "").partition(": ")
            if one.option_strings and colon and set(owners.split(", ")) <= set(self.actions):
                one.help = about if word in owners.split(", ") else argparse.SUPPRESS

    def _tell_use(self, word: str, words: str) -> None:
        """The usage of one action, and in the place of what all of them do, what this one does."""
        self.usage = f"{self.prog} {word} {words} [options]"
        for one in [one for one in self._actions if not one.option_strings]:
            if one.dest == "action":
                parts = (one.help or "").split("; ")
                self.description, one.help = next(part for part in parts if part.startswith(word)), argparse.SUPPRESS
            else:
                told = [part.partition(": ") for part in (one.help or "").split("; ")]
                one.metavar, one.help = words, next(about for names, _, about in told if word in names.split(", "))

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
        under.usage, under.short, under.behind = command.usage or None, command.short, command.actions
        for words in command.words:
            under.actions = words.said if words.name == "action" else under.actions
            _add_words(under, words)
        for flag in command.flags:
            _add_flag(under, flag)
    return made


def near(word: str, known: Sequence[str]) -> str:
    """The end of a message about a word that is not known: what was meant, or all that there is."""
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else f"; there are {', '.join(known)}"


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
        told = flag.about if flag.default in (None, "", math.inf) else f"{flag.about} (default: {flag.default})"
        under.add_argument(flag.name, metavar=flag.value, type=flag.kind, default=flag.default, required=flag.needed, help=told)
