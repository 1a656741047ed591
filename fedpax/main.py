"""The command line: ``fedpax train``, ``compare``, ``plan`` and ``list``."""

import dataclasses
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import tyro
from absl import flags

from fedpax.experiments.catalog import did_you_mean, experiments, find_experiment
from fedpax.parallel.mesh import MeshConfig
from fedpax.parallel.simulated_devices import provide_worker_threads, simulate_devices
from fedpax.planning import (
    MemoryOverflowError,
    PlanError,
    TopologyError,
    find_topology,
    plan_experiment,
    to_json,
    to_text,
)
from fedpax.planning.draw_mesh import draw_mesh
from fedpax.planning.memory_overflow import overflow_report
from fedpax.training.checkpoint import latest_round
from fedpax.training.compare import write_comparison
from fedpax.training.configuration import ConfigurationError, claim, write_atomically
from fedpax.training.experiment import Experiment
from fedpax.training.logging import NonFiniteError
from fedpax.training.preemption import run_subprocess
from fedpax.training.trainer import train

USAGE = """\
fedpax: federated and multi-island training on JAX

  fedpax list
      Shows the experiments that come with fedpax.
  fedpax train --exp=NAME --job_log_dir=DIR [--FIELD=VALUE ...]
      Trains an experiment in a folder, or goes on where the folder stands.
  fedpax compare --exp=NAME,NAME,... --job_log_dir=DIR [--FIELD=VALUE ...]
      Trains each in DIR/NAME, prints a table, and writes DIR/comparison.png and comparison.json.
  fedpax plan --exp=NAME --topology=v5p:4x8x8 [--slices=4] [--json=FILE] [--picture=FILE.png]
              [--program=FILE] [--FIELD=VALUE ...]
      Compiles an experiment's round for devices that need not be there, and says what it needs
      and how fast it can be: memory, collectives, bytes between slices, a bound on step time.

  --exp             a name from `fedpax list`, or my_package.my_module:function, a function
                    without arguments that returns an Experiment
  --job_log_dir     the folder for config.json, metrics.jsonl, tensorboard/ and checkpoints/
  --accept_changes  go on in a folder of another configuration: another mesh, more rounds,
                    another number of islands (whose data then begin anew)
  --multihost       train with all processes of a pod or a cluster, each of which is given the same
                    command (`jax.distributed.initialize` finds them, or JAX_COORDINATOR_ADDRESS,
                    JAX_NUM_PROCESSES and JAX_PROCESS_ID name them)
  --FIELD=VALUE     changes a field of the experiment, such as --model.num_layers=4;
                    `fedpax train --exp=NAME --help` shows all of them
  --topology        v5e:16x16, v4:4x4x4 (also v5p, v6e, tpu7x) with libtpu installed; cpu:8; gpu
  --slices          how many of them, joined by the data centre's network
  --json, --picture, --program
                    files for the report, the mesh, and the text of the compiled round

Exit status: 0 finished; 1 stopped because the loss was not finite, or planned what does not fit
the devices' memory; 2 refused, the message says why; 130 after Ctrl-C and 143 after SIGTERM,
saved: the same command goes on.
"""


REFUSED = 2


class UsageError(Exception):
    """A command that cannot be carried out; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments after the program's name; those of the process if not given.

    Returns:
        The exit status, as ``fedpax --help`` explains it.

    Example:
        >>> print("status", main(["--help"]))  # doctest: +ELLIPSIS
        fedpax: federated and multi-island training on JAX
        ...
        status 0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {"list": _list, "train": _train, "compare": _compare, "plan": _plan}
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return REFUSED
    command, *rest = arguments
    if command in ("--help", "-h", "help", "--helpfull"):
        print(USAGE, end="")
        return 0
    try:
        if command not in commands:
            raise UsageError(
                f"there is no command {command!r}.{did_you_mean(command, commands)} "
                "`fedpax --help` shows all of them."
            )
        return commands[command](rest)
    except (NonFiniteError, MemoryOverflowError) as error:
        print(f"fedpax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedpax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        if not _is_refusal(error):
            raise
        print(f"fedpax: {error}", file=sys.stderr)
        return REFUSED


def configure(exp: str, overrides: Sequence[str]) -> Experiment:
    """Makes an experiment's configuration with some fields changed.

    Args:
        exp: the experiment, as in :func:`find_experiment`.
        overrides: arguments such as ``"--model.num_layers=4"``.

    Returns:
        The configuration.

    Raises:
        UnknownExperimentError: if there is none of this name.
        UsageError: if it is not an experiment.
        SystemExit: with status 2 for a field that is not there or a value that does not fit, and
            with 0 for ``--help``; either has been printed.
    """
    function = find_experiment(exp)
    experiment = function()
    if not isinstance(experiment, Experiment):
        raise UsageError(
            f"--exp={exp} returns a {type(experiment).__name__}: it must be a function without "
            "arguments that returns a fedpax.training.experiment.Experiment."
        )
    return tyro.cli(
        type(experiment),
        default=experiment,
        args=list(overrides),
        prog=f"fedpax train --exp={exp} --job_log_dir=DIR",
        description=inspect.getdoc(function) or "",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )


def _list(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(USAGE, end="")
        return 0
    if arguments:
        raise UsageError(f"`fedpax list` takes no arguments, but was given {arguments[0]!r}.")
    found = experiments()
    width = max(map(len, found), default=0)
    for name, function in sorted(found.items()):
        print(f"{name.ljust(width)}  {(inspect.getdoc(function) or '').partition(chr(10))[0]}")
    return 0


def _train(arguments: Sequence[str]) -> int:
    options, overrides = _parse("train", arguments)
    if options is None:
        return 0
    experiment = configure(options.exp, overrides)
    _need_folder(options)
    if options.multihost:
        _join_processes()
    else:
        _provide_devices(experiment.mesh)
    outcome = train(
        experiment, options.job_log_dir, exp=options.exp, accept_changes=options.accept_changes
    )
    folder, wanted = options.job_log_dir, experiment.training.rounds
    rounds = f"{outcome.rounds} of {wanted} rounds"
    if outcome.signal is not None:
        print(f"{outcome.signal.name}: saved {rounds} in {folder}; the same command goes on.")
        return 128 + outcome.signal
    if not outcome.rounds_trained:
        more = outcome.rounds > wanted
        held = f"{outcome.rounds} rounds, and {wanted} were asked for" if more else f"all {rounds}"
        print(f"Nothing to do: {folder} holds {held}.")
        return 0
    loss = (outcome.evaluation or {}).get("loss", math.nan)
    print(f"Finished {rounds} in {folder}: held-out loss {loss:.4f}.")
    return 0


def _compare(arguments: Sequence[str]) -> int:
    options, overrides = _parse("compare", arguments)
    if options is None:
        return 0
    names = [name for name in options.exp.split(",") if name]
    configured = {name: configure(name, overrides) for name in names}
    _need_folder(options)
    folders = {name.rpartition(":")[2]: name for name in names}
    if len(folders) < len(names):
        raise UsageError(f"--exp={options.exp} names an experiment twice, or two of one name.")
    destination = Path(options.job_log_dir)
    for folder, name in folders.items():
        claim(
            destination / folder,
            configured[name],
            name,
            accept_changes=options.accept_changes,
            writes=False,
        )
    for folder, name in folders.items():
        if (latest_round(destination / folder) or 0) >= configured[name].training.rounds:
            print(f"{name} is finished already.", file=sys.stderr)
            continue
        # A process each: how many devices a CPU shows can be set only once in a process.
        where = f"--job_log_dir={destination / folder}"
        status = run_subprocess(
            [sys.executable, "-m", "fedpax.main", "train", f"--exp={name}", where, *overrides]
        )
        if status:
            return status
    print(write_comparison({f: destination / f for f in folders}, destination))
    print(f"\nSee {destination / 'comparison.png'} and {destination / 'comparison.json'}.")
    return 0


def _plan(arguments: Sequence[str]) -> int:
    options, overrides = _parse("plan", arguments)
    if options is None:
        return 0
    if not options.topology:
        raise UsageError("give the devices to plan for, such as --topology=v5p:4x4x4 or cpu:8.")
    if options.picture and not options.picture.endswith(".png"):
        raise UsageError(f"--picture={options.picture}: the picture is a PNG, such as mesh.png.")
    experiment = configure(options.exp, overrides)
    topology = find_topology(options.topology, options.slices)
    plan, run = plan_experiment(
        experiment,
        topology,
        exp=options.exp,
        program_file=options.program,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(to_text(plan), end="")
    if options.json:
        write_atomically(Path(options.json), json.dumps(to_json(plan), indent=2) + "\n")
    if options.picture:
        draw_mesh(plan, run.mesh, options.picture)
    if plan.memory.fits is False:
        memory = plan.memory
        shortage = f"needs {memory.total / 2**30:.2f}G of {(memory.capacity or 0) / 2**30:.2f}G"
        raise MemoryOverflowError(overflow_report(options.exp, topology, experiment, run, shortage))
    return 0


def _parse(command: str, arguments: Sequence[str]) -> tuple[flags.FlagValues | None, list[str]]:
    """Takes the flags of a command and leaves the experiment's fields; None after its help."""
    options = flags.FlagValues()
    options.set_gnu_getopt(True)  # flags may stand behind "--model.num_layers 4"
    names = "Experiments, with commas between." if command == "compare" else "The experiment."
    flags.DEFINE_string("exp", None, names, flag_values=options)
    if command == "plan":
        flags.DEFINE_string("topology", None, "The devices.", flag_values=options)
        flags.DEFINE_integer("slices", 1, "How many slices.", flag_values=options)
        flags.DEFINE_string("json", None, "A file for the report.", flag_values=options)
        flags.DEFINE_string("picture", None, "A PNG of the mesh.", flag_values=options)
        flags.DEFINE_string("program", None, "A file for the text.", flag_values=options)
    else:
        flags.DEFINE_string("job_log_dir", None, "The folder.", flag_values=options)
        flags.DEFINE_bool("accept_changes", False, "Take the new settings.", flag_values=options)
    if command == "train":
        flags.DEFINE_bool("multihost", False, "Train with other processes.", flag_values=options)
    try:
        _, *rest = options([f"fedpax {command}", *arguments], known_only=True)
    except flags.Error as error:
        raise UsageError(f"{error}. `fedpax --help` shows how to write it.") from None
    if options.exp:
        return options, rest
    if {"--help", "-h"} & set(rest):
        print(USAGE, end="")
        return None, rest
    raise UsageError(f"give `fedpax {command}` an --exp=NAME; `fedpax list` shows the names.")


def _need_folder(options: flags.FlagValues) -> None:
    if not options.job_log_dir:
        raise UsageError(
            "give a folder for checkpoints and metrics, such as --job_log_dir="
            f"runs/{options.exp.partition(',')[0].rpartition(':')[2]}."
        )


def _join_processes() -> None:
    """Joins the processes that train together, before anything asks for a device."""
    count, own = (os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
    try:
        # CPUs of several processes need gloo to talk; other devices bring what they need.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            num_processes=int(count) if count else None, process_id=int(own) if own else None
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"--multihost found no other processes: {error} On a TPU pod or under Slurm they are "
            "found; elsewhere set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID."
        ) from None


def _provide_devices(mesh: MeshConfig) -> None:
    """Simulates the devices that a mesh needs where there is only a CPU, unless the user has.

    A mesh that takes all devices gets one for each core: clients that run one after another on a
    device keep one core busy and no more.
    """
    all_devices = -1 in dataclasses.astuple(mesh)
    needed = _cores() if all_devices else mesh.size
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ
    chosen |= "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    # On a mesh of one axis every collective runs over all devices.
    groups = sum(size != 1 for size in dataclasses.astuple(mesh)) > 1
    if groups:
        provide_worker_threads(needed)
    if not chosen:
        try:
            simulate_devices(needed, subgroups=groups)
        except RuntimeError:  # devices are in use already: those must do
            chosen = True
    if not all_devices and jax.device_count() < mesh.size:
        axes = ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(mesh).items() if v != 1)
        remedy = "Make the mesh smaller, such as --mesh.fsdp=-1 for all that there are"
        if chosen:
            remedy += ", or leave XLA_FLAGS and JAX_NUM_CPU_DEVICES unset to simulate more"
        raise UsageError(
            f"the mesh {axes} needs {mesh.size} devices, but there are {jax.device_count()} "
            f"({jax.default_backend()}). {remedy}."
        )


def _is_refusal(error: Exception) -> bool:
    """Whether an error says all there is to say, so that a traceback would only hide it.

    So do those made for the command line, and what fedpax refuses, such as a cohort larger than the
    population, unless the user's code or a library's, other than what reads data, lies on the way.
    """
    if isinstance(error, UsageError | ConfigurationError | TopologyError | PlanError):
        return True
    if not isinstance(error, ValueError | OSError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    own = {"fedpax", "__main__"}
    return packages[-1] in own and {*own, *sys.stdlib_module_names, "grain"}.issuperset(packages)


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
