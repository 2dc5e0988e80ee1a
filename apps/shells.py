"""Scripts by which shells complete `mmsdk`: commands, flags with what they mean, and the names of methods, benches, bundles and formats.

All of it is written into the script, so that nothing is started while somebody types. Where a path or a number is wanted, the shell offers
files or nothing.
"""

from collections.abc import Mapping, Sequence

from mmsdk import plugins
from mmsdk.apps.arguments import COMMANDS, Command
from mmsdk.apps.flags import Flag, Words
from mmsdk.weights.bundle import available

__all__ = ["SHELLS", "bash", "fish", "zsh"]

PATHS = ("FILE", "FOLDER", "PICTURE", "FILE.py:NAME", "WHAT", "PATH...", '[PATH ...] "question"')
"""What stands for a path, among the names of what is said."""

METHODS = {"--compress": "mmsdk.tokencomp.methods", "--kv": "mmsdk.kv.policies"}
"""Flags behind which a method may stand, and the package whose files these are."""

_BASH = """\
# What bash offers behind `mmsdk`. In ~/.bashrc: eval "$(mmsdk completion bash)"
_mmsdk() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
    local flags= valued= offered= paths= place=0 i
    COMPREPLY=()
    [[ $COMP_CWORD -eq 1 ]] && command=
    case $command in
FLAGS    esac
    for ((i = 2; i < COMP_CWORD; i++)); do
        case " $valued " in
        *" ${COMP_WORDS[i]} "*) ((i++)) ;;
        *) [[ ${COMP_WORDS[i]} == -* ]] || ((place++)) ;;
        esac
    done
    if [[ $current == -* ]]; then
        offered=$flags
    elif [[ $previous == -* && " $valued " == *" $previous "* ]]; then
        case "$command $previous" in
VALUES        esac
    elif [[ $previous != : && $current != : ]]; then
        case "$command $place" in
PLACES        *) offered=$flags ;;
        esac
    fi
    [[ $paths ]] || compopt +o default 2>/dev/null
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
    [[ ${COMPREPLY-} == *: ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _mmsdk mmsdk
"""

_ZSH = """\
#compdef mmsdk
# What zsh offers behind `mmsdk`. In ~/.zshrc, behind compinit: eval "$(mmsdk completion zsh)"
_mmsdk() {
    local current=${words[CURRENT]} previous=${words[CURRENT-1]} command=${words[2]} place=0 paths= i
    local -a flags valued offered names
    (( CURRENT == 2 )) && command=
    case $command in
FLAGS    esac
    for ((i = 3; i < CURRENT; i++)); do
        if (( ${valued[(Ie)${words[i]}]} )); then ((i++)); elif [[ ${words[i]} != -* ]]; then ((place++)); fi
    done
    if [[ $current == -* ]]; then
        offered=($flags)
    elif (( ${valued[(Ie)$previous]} )); then
        case "$command $previous" in
VALUES        esac
    else
        case "$command $place" in
PLACES        *) offered=($flags) ;;
        esac
    fi
    [[ -n $paths ]] && _files
    (( $#names )) && compadd -S : -- $names
    (( $#offered )) && _describe -V mmsdk offered
}
compdef _mmsdk mmsdk
"""

_FISH = """\
# What fish offers behind `mmsdk`. In ~/.config/fish/config.fish: mmsdk completion fish | source
function __mmsdk_at -a command place
    set -l said (commandline -opc)
    test (count $said) -ge 2; and test $said[2] = $command; or return 1
    test -n "$place"; or return 0
    set -l count -2
    set -l behind
    for word in $said
        if test -n "$behind"
            set behind
        else if contains -- $word VALUED
            set behind $word
        else if not string match -q -- '-*' $word
            set count (math $count + 1)
        end
    end
    test $count -eq $place
end
complete -c mmsdk -f
COMPLETE"""


def bash() -> str:
    """The script for bash, 3.2 or later."""
    flags = {name: f"flags='{_names(command.flags)}' valued='{_names(_valued(command))}'" for name, command in COMMANDS.items()}
    places = {
        key: " ".join(["paths=1"] * _is_path(words) + [f"offered='{' '.join(_said(words, name))}'"]) for key, name, words in _places()
    }
    first = {'" 0"': f"offered='{' '.join([*COMMANDS, '--help', '--version'])}'"}
    values = {place: _bash_values(flag) for place, flag in _offering().items()}
    return _filled(_BASH, flags, values, first | places)


def zsh() -> str:
    """The script for zsh."""
    flags = {
        name: f"flags=({_described({flag.name: _brief(flag) for flag in command.flags})}) valued=({_names(_valued(command))})"
        for name, command in COMMANDS.items()
    }
    places = {
        key: " ".join(["paths=1"] * _is_path(words) + [f"offered=({' '.join(map(_quoted, _said(words, name)))})"])
        for key, name, words in _places()
    }
    first = {'" 0"': f"offered=({_described({name: command.about for name, command in COMMANDS.items()})})"}
    values = {place: _zsh_values(flag) for place, flag in _offering().items()}
    return _filled(_ZSH, flags, values, first | places)


def fish() -> str:
    """The script for fish."""
    lines = [f"complete -c mmsdk -n __fish_use_subcommand -a {name} -d {_quoted(command.about)}" for name, command in COMMANDS.items()]
    for name, command in COMMANDS.items():
        for flag in command.flags:
            taken = f" -r -F -a '{' '.join(_values(flag))}'" if flag.value in PATHS else f" -x -a '{' '.join(_values(flag))}'"
            lines.append(
                f"complete -c mmsdk -n '__mmsdk_at {name}' -l {flag.name[2:]}{taken if flag.value else ''} -d {_quoted(_brief(flag))}"
            )
    for key, name, words in _places():
        place = "" if words.number == "+" else f" {key.strip(chr(34)).split()[1]}"
        taken = " -F" if _is_path(words) else f" -a '{' '.join(_said(words, name))}'"
        lines.append(f"complete -c mmsdk -n '__mmsdk_at {name}{place}'{taken}")
    valued = {flag.name: flag for command in COMMANDS.values() for flag in _valued(command)}
    return _FISH.replace("VALUED", " ".join(valued)).replace("COMPLETE", "".join(f"{line}\n" for line in lines))


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def _filled(script: str, flags: Mapping[str, str], values: Mapping[str, str], places: Mapping[str, str]) -> str:
    """The script with one branch for each command, each flag that takes something, and each place of a word."""
    for name, branches in (("FLAGS", flags), ("VALUES", values), ("PLACES", places)):
        indent = " " * (4 if name == "FLAGS" else 8)
        script = script.replace(name, "".join(f"{indent}{pattern}) {done} ;;\n" for pattern, done in branches.items()))
    return script


def _places() -> list[tuple[str, str, Words]]:
    """Each place of a word, as the shells' pattern `"command place"`, the command and the words."""
    numbered = [(name, number, words) for name, command in COMMANDS.items() for number, words in enumerate(command.words)]
    return [(f'"{name} "*' if words.number == "+" else f'"{name} {number}"', name, words) for name, number, words in numbered]


def _said(words: Words, command: str) -> Sequence[str]:
    if words.metavar == "NAME":
        return plugins.available("mmsdk.apps.bench") if command == "bench" else list(dict.fromkeys(part.bundle for part in available()))
    return words.said


def _values(flag: Flag) -> list[str]:
    """What may stand behind a flag; names of methods end in a colon, behind which comes how much they keep."""
    package = METHODS.get(flag.name)
    return [*flag.said, *(f"{name}:" for name in plugins.available(package))] if package else list(flag.said)


def _offering() -> dict[str, Flag]:
    """Each flag of which it is known what may stand behind it, by the pattern `"command flag"`; first, where one command differs."""
    known = [(name, flag) for name, command in COMMANDS.items() for flag in command.flags]
    usual = {flag.name: flag for _, flag in reversed(known) if flag.value in PATHS or _values(flag)}
    own = {f'"{name} {flag.name}"': flag for name, flag in known if flag.name in usual and flag.said != usual[flag.name].said}
    return own | {f'*" {name}"': flag for name, flag in usual.items()}


def _valued(command: Command) -> list[Flag]:
    return [flag for flag in command.flags if flag.value]


def _is_path(words: Words) -> bool:
    return words.metavar in PATHS


def _names(flags: Sequence[Flag]) -> str:
    return " ".join(flag.name for flag in flags)


def _brief(flag: Flag) -> str:
    return flag.about.partition(";")[0]


def _described(about: Mapping[str, str]) -> str:
    """Words for zsh's _describe: a colon parts a word from what it means."""
    return " ".join(_quoted(f"{word}:{text}") for word, text in about.items())


def _bash_values(flag: Flag) -> str:
    return f"offered='{' '.join(_values(flag))}'" if _values(flag) else "paths=1" * (flag.value in PATHS)


def _zsh_values(flag: Flag) -> str:
    if flag.value in PATHS:
        return "paths=1"
    names, others = ([value for value in _values(flag) if value.endswith(":") == ended] for ended in (True, False))
    return f"names=({' '.join(name.removesuffix(':') for name in names)}) offered=({' '.join(others)})"


def _quoted(text: str) -> str:
    """One word, as all three shells read it."""
    return "'" + text.replace("'", "'\\''") + "'"
