"""The command line, `fedpax`: choose the command, and turn errors and signals into exit codes."""

import errno
import importlib
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpax import __version__
from fedpax.commands import COMMANDS
from fedpax.console import (
    discard_output,
    escape_logs,
    escape_unknown_characters,
    hide_late_writes,
    open_closed_streams,
    print_error,
)
from fedpax.errors import (
    ArgumentError,
    ArgumentTypeError,
    FedpaxError,
    MissingFieldError,
    MissingPackageError,
)
from fedpax.extras import optional
from fedpax.files import describe_no_permission
from fedpax.garbage_collection import collect_seldom
from fedpax.preemption import delay_interrupts, exit_on_signals

_COMMANDS = "".join(command.usage for command in COMMANDS.values())

USAGE = (
    f"fedpax: federated and multi-island training on JAX\n\n{_COMMANDS}"
    + """\
  fedpax --version

  --exp             a name from `fedpax list`, my_package.my_module:function or
                    path/to/file.py:function; the function has no arguments and returns an
                    Experiment, or an ExperimentGroup, of which GROUP:NAME is an experiment.
                    Commands that read the run of such a function need it again
  --job_log_dir     the folder for config.json, metrics.jsonl, tensorboard/ and checkpoints/;
                    one process at a time can use it. Commands that read a run also take its
                    --training.checkpoint_dir, such as gs://BUCKET/FOLDER
  --allow_config_change
                    fields whose values may differ from those in the folder, separated by commas,
                    such as training.rounds,mesh; mesh allows all mesh.* fields. Raising
                    --training.rounds of a finished run does not need this flag
  --target          a held-out metric and its value, such as accuracy=0.85 or loss=0.5; default:
                    the group's target
  --participant_states
                    what islands and clients keep between rounds when a run resumes with another
                    number of them: average (default) keeps its mean, copy gives island i the
                    state of saved island i modulo their number
  --engine          beam: run the rounds as jobs on Apache Beam, with the rounds up to the next
                    evaluation or checkpoint in each; evaluate: read the held-out data there.
                    prepare: sort the files there.
                    out_of_core: run them here, with the data of a few clients in memory.
                    flower: evaluate on Flower's nodes, each on its own held-out data
  --beam_flags      flags of the pipeline, such as "--runner=FlinkRunner --temp_location=..."
                    (default: this process)
  --chunk_size      clients whose data --engine=out_of_core has in memory (default 16)
  --flower_flags    arguments of "flwr run", such as the name of a SuperLink
  --multihost       train, or join a syncer as one island, with all processes of a cluster, each
                    started with the same command. They find each other by
                    JAX_COORDINATOR_ADDRESS=HOST:PORT (of process 0), JAX_NUM_PROCESSES and
                    JAX_PROCESS_ID (from 0), else in a Slurm step (srun) or on a TPU pod by
                    themselves
  --join_timeout    seconds to wait for the other processes (default 300)
  --heartbeat_timeout
                    seconds until a process that sends nothing counts as dead (default 100)
  --elastic         restart with the remaining processes when one is lost, and include it when it
                    returns; processes find each other as with --multihost
  --keeper          the command that decides which processes train: first (default), the command of
                    process 0; alone: this command, which does not train; elsewhere: the
                    command with --keeper=alone
  --copy_every      rounds between copies of the state in each host's memory, from which an elastic
                    run restarts (default 1; 0: restart from the newest checkpoint)
  --copy_dir        the folder in the host's memory for these copies (default /dev/shm)
  --listen          the syncer's address for islands; without --certificates a loopback address
  --syncer          the address of the syncer that an island joins
  --heartbeat_seconds
                    seconds between heartbeats of an island (default 1)
  --certificates    this site's folder, as `fedpax certificates` makes one for each name
  --name            the island's name; default: the name of its folder
  --shard           the island's shard of the data, from 0; default: a free one
  --server_name     the name in the syncer's certificate; default: the host of --syncer
  --seeds           seeds of the compared runs, each as --seed sets it, such as 0,1,2
  --metric          the metrics for the second table and the picture, such as accuracy,loss;
                    default: all in the table, the loss in the picture
  --seed            sets all seeds of an experiment, of its model, data and cohorts; a seed that is
                    stated by its own name, such as --training.seed=0, keeps its value. For
                    generate: the seed of the tokens
  --FIELD=VALUE     overrides a field of the experiment, such as --model.num_layers=4;
                    `fedpax train --exp=NAME --help` shows all fields
  --model.weights   the Hugging Face folder that an experiment on text begins from, with its
                    architecture and tokenizer; --lora.rank=8 trains adapters of it (LoRA)
  --topology        v5e:16x16, v4:4x4x4 (also v5p, v6e, tpu7x) with libtpu installed; cpu:8; gpu
  --slices          the number of slices, joined by the data center's network
  --bandwidth       Gbit/s out of a slice, in each direction; default: the published bandwidth of
                    its chips together
  --json            the file for the report or the metrics
  --picture         the PNG for the mesh (plan), the losses (show) or the clients (partition, data)
  --hlo             the file for the compiled text (HLO) of the round
  --client          the column of files that names clients; default: {client} in the path, else each
                    of several files is a client
  --label           the column of files with the label
  --partition       clients for files that have none: iid:CLIENTS, dirichlet:ALPHA:CLIENTS,
                    shards:SHARDS:CLIENTS or quantity:ALPHA:CLIENTS
  --split           the text for {split} in the path of files
  --columns         the columns of files to read; default: all
  --types           types of Arrow for columns of files, such as zip=string
  --delimiter       the character between the columns of CSV
  --image_size      the height and width to which images are resized
  --on_bad_row      error (default), or skip to leave out and count damaged rows and those without
                    a client
  --heldout_fraction
                    the share of the examples that --split=heldout has and --split=train has not,
                    chosen by a hash of their content
  --heldout_by      what is hashed: example (default), client or a column
  --memory          the memory for sorting; default: half of the machine's
  --round           the checkpoint's round, or best: the round of the best held-out metric
                    (--training.keep_best); default: the newest
  --format          huggingface, orbax, npz or safetensors; default: by the suffix of --out, else
                    huggingface
  --dtype           casts the exported parameters: float32, bfloat16 or float16
  --temperature     sampling temperature; 0 always takes the most likely token
  --top_p           samples from the smallest set of tokens with this total probability

Compiled programs are kept in $XDG_CACHE_HOME/fedpax/jax (default ~/.cache/fedpax/jax), so that the
next start is faster. JAX_ENABLE_COMPILATION_CACHE=0 in the environment switches this off, and
JAX_COMPILATION_CACHE_DIR=DIR names another folder.

Exit status:
    0  finished
    1  stopped: the loss is not finite or spikes repeatedly, the disk is full, a planned round does
       not fit the devices' memory, your own code raised an exception, or `fedpax doctor` found a
       problem
    2  usage error, or a folder or configuration that cannot be used; the message names the remedy
   70  a round hung, with --training.on_hang=exit; the same command resumes
   75  the keeper of an elastic job, a process of an island, or an island's syncer is gone; the same
       commands resume
  130  Ctrl-C, and 143 SIGTERM: completed rounds are saved, and the same command resumes
  141  SIGPIPE: the program that read the output has exited
"""
)

STOPPED = 1
USAGE_ERROR = 2
CALLERS_ERRORS = (ArgumentError, ArgumentTypeError, MissingFieldError, MissingPackageError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, in the program or in Python.

    In Python, signals keep their handlers until the training begins: Ctrl-C raises
    `KeyboardInterrupt`, and a notebook's kernel lives on. In the training, the first Ctrl-C saves.

    An experiment that is a Python object is trained by `fedpax.train`.

    Args:
        argv: the arguments after the program's name, a list of strings. Default None: the process's
            arguments.

    Returns:
        The exit status, as `fedpax --help` explains it. An error has been printed on stderr.

    Raises:
        KeyboardInterrupt: Ctrl-C before or after the training, or a second one in it.

    Example:
        >>> print("status", main(["--help"]))  # doctest: +ELLIPSIS
        fedpax: federated and multi-island training on JAX
        ...
        status 0
    """
    open_closed_streams()
    escape_unknown_characters()
    try:
        status = _run(sys.argv[1:] if argv is None else _check_words(argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        discard_output(sys.stdout)
        return 128 + signal.SIGPIPE
    except SystemExit as stop:  # tyro has printed the fields, or the error in one
        if isinstance(stop.code, str):
            print_error(stop.code)
            return STOPPED
        return int(stop.code or 0)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            discard_output(sys.stdout)
            where = error.filename or "the output"
            print_error(
                f"fedpax: {where} cannot be written: {error.strerror}. Make room on the disk, "
                "or write to another one."
            )
            return STOPPED
        if (failure := _status_of(error)) is None:
            raise
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            print_error(f"fedpax: {describe_no_permission(Path(error.filename))}")
        else:
            print_error(f"fedpax: {error}")
        return failure


def program() -> int:
    """Run the command line of this process, which Ctrl-C and SIGTERM end at once.

    Returns:
        The exit status.
    """
    open_closed_streams()
    escape_logs()
    hide_late_writes()
    with exit_on_signals():
        try:
            return main()
        except KeyboardInterrupt:
            print_error("fedpax: SIGINT: stopped without saving.")
            return 128 + signal.SIGINT


def _check_words(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a call in Python, if they are a list of strings."""
    is_list = isinstance(argv, Sequence) and not isinstance(argv, str)
    wrong = [word for word in argv if not isinstance(word, str)] if is_list else [argv]
    if not wrong:
        return list(argv)
    from fedpax.errors import UsageError

    shown = repr(argv) if isinstance(argv, str) else f"a {type(wrong[0]).__name__}"
    raise UsageError(
        f"main got {shown}, expected a list of the arguments of the command line, such as "
        '["train", "--exp=fedavg_digits", "--job_log_dir=runs/digits"]. To train an experiment '
        'that is a Python object, call fedpax.train(experiment, "runs/NAME").'
    )


def _run(arguments: list[str]) -> int:
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return USAGE_ERROR
    command, *rest = arguments
    if command in ("--help", "-h", "help", "--helpfull"):
        print(USAGE, end="")
        return 0
    # With one experiment, --help shows its fields.
    named = "--job_log_dir" if command in ("evaluate", "generate", "export") else "--exp"
    shows_fields = command != "compare" and any(named in word for word in rest)
    if command in COMMANDS and {"--help", "-h"} & set(rest) and not shows_fields:
        from fedpax.commands.help import help_of

        print(help_of(command, USAGE), end="")
        return 0
    if command in ("--version", "version"):
        print(f"fedpax {__version__}")
        return 0
    # Here, because the command's imports take seconds: signals are handled by now.
    if command not in COMMANDS:
        from fedpax.errors import UsageError
        from fedpax.experiments.catalog import did_you_mean

        raise UsageError(
            f"there is no command {command!r}.{did_you_mean(command, COMMANDS)} "
            "Run `fedpax --help` to see all commands."
        )
    module, _, name = COMMANDS[command].place.partition(":")
    with optional(f"`fedpax {command}`"):
        with delay_interrupts(), collect_seldom():
            execute: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name)
        return execute(rest)


def _status_of(error: Exception) -> int | None:
    """Return the exit status of an error whose message is enough. None: show a traceback.

    The message is enough for fedpax's own errors and for an OSError in its code. An error about an
    argument, or an OSError, that passed through the code of the user or of another library, except
    JAX and a reader of data, needs its traceback.
    """
    if not isinstance(error, FedpaxError | OSError):
        return None
    if isinstance(error, FedpaxError) and not isinstance(error, CALLERS_ERRORS):
        return error.exit_status
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    known = {*sys.stdlib_module_names, "__main__", "fedpax", "grain", "jax"}
    is_own = packages[-1] in ("__main__", "fedpax") and known.issuperset(packages)
    return USAGE_ERROR if is_own else None


if __name__ == "__main__":
    sys.exit(program())
