"""Options that the commands share: the command's own flags, and the experiment's fields."""

import dataclasses
import difflib
import functools
import inspect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro
from absl import flags

from fedpax.checks import check_integer_fields
from fedpax.commands.command_table import COMMANDS
from fedpax.commands.flag_table import Flag
from fedpax.commands.parts.devices import skip_absent_tpus
from fedpax.commands.parts.field_parsing import parse_fields, split_columns, with_fields
from fedpax.console import print_error
from fedpax.errors import UsageError
from fedpax.experiments.catalog import ExperimentGroup, UnknownExperimentError, find_experiment
from fedpax.experiments.catalog import describe_group as describe_experiments
from fedpax.run_files.configuration import check_is_dataclass, seed_paths, with_seed
from fedpax.run_files.paths import resolve_job_log_dir
from fedpax.settings.function_settings import FunctionSettings
from fedpax.training.experiment import Experiment

RESERVED = frozenset({"exp", "job_log_dir"})  # no field can have the name of these flags
_DEFINE: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    list: flags.DEFINE_multi_string,
}


def parse(
    command: str, arguments: Sequence[str], own: Sequence[str] = (), *, needs_exp: bool = True
) -> tuple[flags.FlagValues, list[str]]:
    """Return a command's flags, parsed, and all other arguments, `own` behind them."""
    options = flags.FlagValues()
    options.set_gnu_getopt(True)  # flags may follow "--model.num_layers 4"
    for name, flag in COMMANDS[command].flags.items():
        _define(options, name, flag)
    try:
        _, *fields = options([f"fedpax {command}", *arguments], known_only=True)
    except flags.Error as error:
        raise UsageError(f"{error}. Run `fedpax --help` to see all flags.") from None
    lists = [name for name, flag in COMMANDS[command].flags.items() if flag.has_commas]
    for name in (name for name in lists if options[name].present > 1):
        raise UsageError(
            f"--{name} is given {options[name].present} times, expected once. Set all its values "
            f"at once, separated by commas: --{name}=A,B."
        )
    if needs_exp and "exp" in options and not options.exp:
        raise UsageError(
            f"`fedpax {command}` has no --exp, expected --exp=NAME. Run `fedpax list` to see the "
            "names."
        )
    return options, [*fields, *own]


def _split_own(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the arguments for fields of an experiment that have the name of a flag."""
    pairs = itertools.zip_longest(arguments, arguments[1:], fillvalue="")
    exps = [w.partition("=")[2] or after for w, after in pairs if w.partition("=")[0] == "--exp"]
    if not exps or not exps[-1] or "," in exps[-1]:
        return [*arguments], []
    skip_absent_tpus()  # before the experiment's file looks for devices
    try:
        fields = getattr(find_experiment(exps[-1])(), "__dataclass_fields__", {})
    except UnknownExperimentError:  # raised again by `configure`, behind errors in flags
        return [*arguments], []
    names = {f"--{name}" for name in ({*fields} & {*COMMANDS[command].flags}) - RESERVED}
    others, own, words = list[str](), list[str](), iter(arguments)
    for word in words:
        if word.partition("=")[0] not in names:
            others.append(word)
        else:
            own += [word] if "=" in word else [word, *itertools.islice(words, 1)]
    return others, own


def _define(options: flags.FlagValues, name: str, flag: Flag) -> None:
    if isinstance(flag.type, tuple):
        flags.DEFINE_enum(name, flag.default, flag.type, flag.text, flag_values=options)
        return
    value_type = flag.type or (str if flag.default is None else type(flag.default))
    define = _DEFINE[value_type]
    if value_type in (int, float):
        define = functools.partial(define, lower_bound=flag.least, upper_bound=flag.most)
    define(name, flag.default, flag.text, flag_values=options)


def parse_run(command: str, arguments: Sequence[str]) -> tuple[flags.FlagValues, Experiment, Path]:
    """Parse the arguments of a command that runs one experiment in a folder."""
    options, fields = parse(command, *_split_own(command, arguments))
    try:
        experiment = configure(options.exp, fields, options.job_log_dir, command=command)
    except SystemExit as stop:  # tyro has printed the error: it knows the fields, not the flags
        if stop.code and (hint := did_you_mean_flag(options, fields)):
            print_error(f"fedpax:{hint}")
        raise
    check_job_log_dir(options)
    return options, experiment, resolve_job_log_dir(options.job_log_dir)


def did_you_mean_flag(options: flags.FlagValues, unknown: Sequence[str]) -> str:
    """Return a sentence with the flag most similar to an unknown argument."""
    names = [word.partition("=")[0].removeprefix("--") for word in unknown if word[:2] == "--"]
    near = [flag for name in names for flag in difflib.get_close_matches(name, list(options), n=1)]
    return f" Did you mean --{near[0]}?" if near else ""


def metric_names_of(options: flags.FlagValues) -> list[str]:
    """Return the names in `--metric`; empty if it is not set."""
    return [name for name in (options.metric or "").split(",") if name]


def allowed_changes(options: flags.FlagValues) -> list[str]:
    """Return the field paths of `--allow_config_change`, which is repeatable and takes commas."""
    paths = (path.strip() for text in options.allow_config_change for path in text.split(","))
    return [path for path in paths if path]


def check_job_log_dir(options: flags.FlagValues) -> None:
    """Check that `--job_log_dir` is given."""
    if not options.job_log_dir:
        exp = (options.exp if "exp" in options else None) or "NAME"
        raise UsageError(
            "--job_log_dir is missing, expected a folder for checkpoints and metrics, such as "
            f"--job_log_dir=runs/{exp.partition(',')[0].rpartition(':')[2]}."
        )


def configure(
    exp: str,
    overrides: Sequence[str],
    job_log_dir: str | Path | None = None,
    *,
    command: str = "train",
) -> Experiment:
    """Make an experiment's configuration and override some of its fields.

    The `--help` of `command` shows the fields.
    """
    if "," in exp:
        raise UsageError(
            f"--exp={exp} names several experiments, expected one. Only `fedpax compare` takes "
            "several; run this command once for each of them."
        )
    skip_absent_tpus()  # before the experiment's file or its mesh looks for devices
    function = find_experiment(exp)
    experiment = function()
    if isinstance(experiment, ExperimentGroup):
        raise UsageError(describe_experiments(exp, experiment))
    if not isinstance(experiment, Experiment):
        raise UsageError(
            f"--exp={exp} returns a {type(experiment).__name__}, expected a "
            "fedpax.training.experiment.Experiment. Return one from a function without arguments."
        )
    check_is_dataclass(experiment)
    for name in sorted(RESERVED & {f.name for f in dataclasses.fields(experiment)}):
        raise UsageError(
            f"--exp={exp} has a field {name}, the name of a flag of the command line. Rename the "
            "field."
        )
    words = f"fedpax {command} --exp={exp}"
    has_folder = command in COMMANDS and "job_log_dir" in COMMANDS[command].flags
    words += " --job_log_dir=DIR" if has_folder else ""
    return override(experiment, overrides, words, inspect.getdoc(function) or "", job_log_dir)


def override(
    experiment: Experiment,
    overrides: Sequence[str],
    command: str,
    description: str,
    job_log_dir: str | Path | None = None,
) -> Experiment:
    """Override some fields of an experiment."""
    numbers, fields = _take(overrides, ("seed",))
    for seed in [_seed(text) for _, text in numbers][-1:]:
        experiment = with_seed(experiment, seed)
    choosable = _choosable(experiment)
    chosen, fields = _take(split_columns(fields), choosable)
    for name, function in chosen:  # with its defaults
        made = _unset(choosable[name].chooser().of(function))
        experiment = with_fields(experiment, {name: made})
    seeds = ", ".join(seed_paths(experiment))
    text = f"{description}\n\n--seed=N sets all seeds at once: {seeds}.".lstrip()
    text += "".join(_describe_choices(*choice) for choice in _choosable(experiment).items())
    try:
        changed = parse_fields(experiment, fields, command, text)
    except SystemExit as stop:
        hints = (describe_group, _other_choices, _did_you_mean_field)
        if stop.code and (hint := next(filter(None, (h(experiment, fields) for h in hints)), "")):
            print_error(f"fedpax: {hint}")
        raise
    flags_given = (word[2:].partition("=")[0] for word in fields if word[:2] == "--")
    given = Counter(name.replace("-", "_") for name in flags_given)
    _check_lists_given_once(changed, given)
    resolved = changed.resolve(experiment, given, job_log_dir)
    check_integer_fields(resolved)
    return resolved


def _check_lists_given_once(experiment: Experiment, given: Mapping[str, int]) -> None:
    """Check that no field of several values is given twice: tyro drops the first ones."""
    # The last of two numbers or names counts, so that a script can end with "$@".
    for name in (name for name, count in given.items() if count > 1):
        if isinstance(operator.attrgetter(name)(experiment), tuple):
            raise UsageError(
                f"--{name} is given {given[name]} times, expected once. Set all its values at "
                f"once, separated by spaces: --{name} A B."
            )


def _take(words: Sequence[str], names: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off the arguments for some names, each with its text, from the others."""
    taken, others, rest = list[tuple[str, str]](), list[str](), iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if flag.startswith("--") and flag[2:] in names:
            taken.append((flag[2:], text if equals else next(rest, "")))
        else:
            others.append(word)
    return taken, others


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--seed={text} is not an integer, expected one. Set for example --seed=1."
        ) from None


def _choosable(experiment: Experiment) -> dict[str, FunctionSettings]:
    """Return the fields that hold the settings of one of several functions, by name."""
    values = {f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)}
    return {name: value for name, value in values.items() if isinstance(value, FunctionSettings)}


def _unset(config_class: type[Any]) -> Any:
    """Return a configuration with its defaults, unchecked; tyro asks for fields that have none."""
    made = object.__new__(config_class)
    for field in dataclasses.fields(config_class):
        is_required = field.default is dataclasses.MISSING
        object.__setattr__(made, field.name, tyro.MISSING if is_required else field.default)
    return made


def _describe_choices(name: str, value: FunctionSettings) -> str:
    """Return the lines of `--help` on the functions of a field."""
    lines = [f"\n\n--{name}=NAME sets the {value.group} and --{name}.FIELD its fields. The names:"]
    lines += [f"  {choice}: {summary}" for choice, summary in value.summaries().items()]
    return "\n".join(lines)


def _other_choices(experiment: Experiment, overrides: Sequence[str]) -> str:
    """Return a sentence on the first argument that is a setting of other functions alone."""
    for word in overrides:
        name, _, setting = word.partition("=")[0].removeprefix("--").partition(".")
        value = _choosable(experiment).get(name)
        if value is None or setting in _field_paths(value):
            continue
        chooser = value.chooser()
        if have := [f for f in value.functions() if setting in _field_paths(chooser.of(f))]:
            return (
                f"--{name}.{setting} is not a setting of {value.function.__name__.strip('_')}. "
                f"Set also --{name}={' or '.join(have)}."
            )
    return ""


def describe_group(experiment: Experiment, overrides: Sequence[str]) -> str:
    """Return a sentence on the first argument that names a group of fields."""
    for word in overrides:
        name = word.partition("=")[0].removeprefix("--")
        try:
            value = operator.attrgetter(name)(experiment)
        except AttributeError:
            continue
        if not word.startswith("--") or not dataclasses.is_dataclass(value):
            continue
        described = f"--{name} is a {type(value).__name__}, set in the code of the experiment"
        if not (fields := dataclasses.fields(value)):
            return f"{described}, and has no fields. Set another one there."
        return f"{described}. Set one of its fields, such as --{name}.{fields[0].name}."
    return ""


def _field_paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of each field of a configuration, also of fields without a value."""
    for field in dataclasses.fields(value):
        item = getattr(value, field.name, None)
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            yield from _field_paths(item, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _did_you_mean_field(experiment: Experiment, overrides: Sequence[str]) -> str:
    """Return a sentence with the field most similar to an unknown argument, if tyro names none."""
    # tyro compares a whole argument, so that a long value behind "=" hides the similarity.
    known = [*_field_paths(experiment)]
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word[:2] != "--" or name in known:
            continue
        for near in difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            if difflib.SequenceMatcher(a=word, b=f"--{near}").ratio() < 0.8:
                return f"Did you mean --{near}?"
    return ""
