"""`fedpax completion`: a script that completes commands, flags, experiments and their fields."""

import dataclasses
import shlex
import typing
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fedpax.commands.command_table import COMMANDS
from fedpax.commands.flag_table import Flag
from fedpax.errors import UsageError
from fedpax.experiments.catalog import experiments
from fedpax.experiments.listing import GROUPS
from fedpax.settings.function_settings import FunctionSettings

SHELLS = COMMANDS["completion"].words
GLOBAL_WORDS = ("--help", "--version")
# The shell itself completes the values of these flags and fields, which are files or folders.
PATHS = (
    "exp", "job_log_dir", "json", "picture", "hlo", "out", "authority", "certificates", "sign",
    "copy_dir", "model.weights", "data.data_dir", "data_dir",
)  # fmt: skip


def completion(arguments: Sequence[str]) -> int:
    """Print the script for a shell."""
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise UsageError(
            f"`fedpax completion` got {' '.join(arguments) or 'no shell'!r}, expected "
            f"{' or '.join(SHELLS)}. Run for example `source <(fedpax completion bash)`."
        )
    print(script(arguments[0]), end="")
    return 0


def script(shell: str) -> str:
    """Return the completion script of a shell, `"bash"` or `"zsh"`."""
    names = experiments()
    by_command = []
    for command, entry in COMMANDS.items():
        words = _flag_words(entry.flags)
        if "exp" in entry.flags:
            words += [f"--exp={name}" for name in names]
        if command == "compare":
            words += [f"--exp={name}" for name in GROUPS]
        words += entry.words
        by_command.append(f"{command}) known=({_quoted([*words, '--help'])}) ;;")
    by_fields = defaultdict(list)
    for name, make in names.items():
        by_fields[tuple(_field_words(make()))].append(name)
    by_experiment = [
        f"{'|'.join(same)}) known+=({_quoted(words)}) ;;" for words, same in by_fields.items()
    ]
    return _SCRIPTS[shell].replace(
        "@CANDIDATES@",
        _CANDIDATES.replace("@ALL@", _quoted([*COMMANDS, *GLOBAL_WORDS]))
        .replace("@COMMANDS@", "\n        ".join(by_command))
        .replace("@EXPERIMENTS@", "\n        ".join(by_experiment)),
    )


def _flag_words(flags: Mapping[str, Flag]) -> list[str]:
    """Return the flags of a command, and `--flag=value` for each value of a choice."""
    words = []
    for name, flag in flags.items():
        words.append(f"--{name}" if flag.default is False else f"--{name}=")
        if isinstance(flag.type, tuple):
            words += [f"--{name}={value}" for value in flag.type]
    return words


def _field_words(configuration: Any, path: str = "") -> list[str]:
    """Return the fields of an experiment, and `--field=value` for each value of a choice."""
    hints = typing.get_type_hints(type(configuration))
    words = []
    for field in dataclasses.fields(configuration):
        value, name = getattr(configuration, field.name), f"{path}{field.name}"
        if isinstance(value, FunctionSettings):
            words += [f"--{name}=", *(f"--{name}={choice}" for choice in value.functions())]
        if dataclasses.is_dataclass(value):
            words += _field_words(value, f"{name}.")
            continue
        words.append(f"--{name}=")
        hint = hints[field.name]
        choices = (True, False) if hint is bool else typing.get_args(hint)
        if hint is bool or typing.get_origin(hint) is typing.Literal:
            words += [f"--{name}={choice}" for choice in choices]
    return words


def _quoted(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


_CANDIDATES = """\
# Print the words that can stand at the cursor: _fedpax_candidates CURRENT_WORD ALL_WORDS...
_fedpax_candidates() {
    local current="$1" command="$3" experiment="" before="" word
    local -a known
    shift 2
    for word in "$@"; do
        case "$word" in --exp=*) experiment="${word#--exp=}" ;; esac
    done
    if [ $# -le 1 ] && [ "$command" = "$current" ]; then
        known=(@ALL@)
    else
        case "$command" in
        @COMMANDS@
        esac
        case "$command" in
            train|compare|plan|partition|syncer|join) ;;
            *) experiment="" ;;
        esac
        case "${experiment%%,*}" in
        @EXPERIMENTS@
        esac
    fi
    case "$current" in  # of several experiments, complete the last one
        --exp=*,*) before="${current%,*}," current="--exp=${current##*,}" ;;
    esac
    for word in "${known[@]}"; do
        case "$word" in
            "$current"*) ;;
            *) continue ;;
        esac
        case "$current" in  # behind its "=", a flag itself is not offered
            *=*) case "$word" in *=) continue ;; esac ;;
            *) case "$word" in *=?*) continue ;; esac ;;
        esac
        if [ -n "$before" ]; then word="$before${word#--exp=}"; fi
        printf '%s\\n' "$word"
    done
}
"""

_BASH = """\
# Completion of fedpax for bash, made by `fedpax completion bash`.
@CANDIDATES@
_fedpax() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS
    local current="${line##*[[:space:]]}"
    local -a typed
    IFS=$' \\t' read -ra typed <<< "$line"
    if [ -z "$current" ]; then typed+=(""); fi
    IFS=$'\\n'
    COMPREPLY=($(_fedpax_candidates "$current" "${typed[@]}"))
    # Bash replaces only what follows the last "=" or ":" of the word.
    local kept="${current%"${current##*[=:]}"}"
    if [ ${#COMPREPLY[@]} -eq 0 ]; then
        case "$current" in @PATHS@)
            compopt -o filenames
            COMPREPLY=($(compgen -f -- "${current#*=}")) ;;
        esac
        return
    fi
    case "${COMPREPLY[0]}" in *=) compopt -o nospace ;; esac
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}
complete -F _fedpax fedpax
"""

_ZSH = """\
#compdef fedpax
# Completion of fedpax for zsh, made by `fedpax completion zsh`.
@CANDIDATES@
_fedpax() {
    local -a candidates flags
    candidates=(${(f)"$(_fedpax_candidates "${words[CURRENT]}" "${(@)words[1,CURRENT]}")"})
    if (( ! $#candidates )); then
        case "${words[CURRENT]}" in @PATHS@) compset -P '*=' && _files ;; esac
        return
    fi
    flags=(${(M)candidates:#*=})
    candidates=(${candidates:#*=})
    (( $#flags )) && compadd -S '' -a flags
    (( $#candidates )) && compadd -a candidates
}
if [ "$funcstack[1]" = "_fedpax" ]; then _fedpax "$@"; else compdef _fedpax fedpax; fi
"""

_PATTERN = "|".join(f"--{name}=*" for name in PATHS)
_SCRIPTS = {
    "bash": _BASH.replace("@PATHS@", _PATTERN),
    "zsh": _ZSH.replace("@PATHS@", _PATTERN),
}
