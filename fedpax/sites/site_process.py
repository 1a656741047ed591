"""The process of a run over sites: its folder, files and server, and the run's identity."""

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

import fedpax
from fedpax.algorithm import Params
from fedpax.checkpoints.checkpoint_files import set_aside_after
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.configuration import flatten, is_within_fedpax, to_json, write_configuration
from fedpax.run_files.paths import CHECKPOINTS, refuse_checkpoint_dir, resolve_job_log_dir
from fedpax.training.experiment import Experiment
from fedpax.training.progress import Progress
from fedpax.training.resume_checks import lock_run
from fedpax.training.run_writers import RunFiles, open_files
from fedpax.transport.admission import Admission
from fedpax.transport.calls import DisconnectedError, Handler, WaitingError, serve

SECONDS_BETWEEN_NOTES = 10.0

SECONDS_TO_ASK_AGAIN = 15.0
"""Seconds for which a site whose run is finished asks whether the syncer has more rounds."""


class SyncerResult(NamedTuple):
    """The result of a syncer, of islands or of rounds over sites with their own data.

    Attributes:
        rounds: completed rounds of the run. A round of islands has one merge per fragment.
        finished: whether all rounds are completed.
        signal: the signal that stopped the call, or None.
    """

    rounds: int
    finished: bool
    signal: signal.Signals | None


class JoinResult(NamedTuple):
    """The result of a site that has joined a syncer.

    Attributes:
        rounds: number of rounds of this island, or in which this site took part, over all of its
            processes.
        finished: whether the syncer has done all rounds.
        signal: as of `SyncerResult`.
        gave_up: whether no syncer answered; in the folder of a finished run, `finished` is True
            too.
    """

    rounds: int
    finished: bool
    signal: signal.Signals | None
    gave_up: bool = False


@contextlib.contextmanager
def locked_folder(
    experiment: Experiment,
    job_log_dir: str | Path,
    command: Literal["syncer", "join"],
    exp: str,
    allow_config_change: Collection[str],
) -> Iterator[Path]:
    """Lock the folder of a process, and check that it belongs to the experiment."""
    folder = resolve_job_log_dir(job_log_dir)
    refuse_checkpoint_dir(experiment.training.checkpoint_dir, command)
    # The number of rounds is the syncer's.
    rounds = ("training.rounds",) if command == "join" else ()
    with lock_run(folder, experiment, exp, (*allow_config_change, *rounds)):
        yield folder


def end_serving(
    files: RunFiles, preemption: PreemptionGuard, rounds: int, finished: bool
) -> SyncerResult:
    """Return the result of a syncer's call, and tell the tracker."""
    files.tracker.finished = finished
    return SyncerResult(rounds, finished, None if finished else preemption.signal)


def items_of(experiment: Any) -> tuple[str, int]:
    """Return the unit of an experiment's items over sites, and their number in an example."""
    items: tuple[str, int] = getattr(experiment, "site_items", ("examples", 1))
    return items


@contextlib.contextmanager
def serving(
    experiment: Experiment,
    folder: Path,
    exp: str,
    handler: Handler,
    listen: str,
    admission: Admission,
    *,
    done: int,
    item_unit: str,
    **settings: Any,
) -> Iterator[tuple[RunFiles, PreemptionGuard]]:
    """Open a syncer's files after `done` rounds, and serve sites, with settings of `serve`."""
    write_configuration(folder, experiment, exp)
    # The user can have restored an older copy of the state.
    set_aside_after(folder / CHECKPOINTS, done)
    with (
        open_files(experiment, folder, exp, done, item_unit) as files,
        files.metrics,
        serve(handler, listen, admission=admission, **settings) as server,
        PreemptionGuard() as preemption,
    ):
        address = f"{listen.rpartition(':')[0]}:{server.port}"
        files.progress.note(f"listening at {address}; folder {folder}")
        yield files, preemption


def patience(progress: Progress) -> Callable[[DisconnectedError], None]:
    """Return a function that prints, at most every 10 seconds, why a site waits."""
    noted = -math.inf

    def note(error: DisconnectedError) -> None:
        nonlocal noted
        if time.monotonic() - noted > SECONDS_BETWEEN_NOTES:
            noted = time.monotonic()
            waits = isinstance(error, WaitingError)
            progress.note(f"waiting: {error}" if waits else f"waiting for the syncer at {error}")

    return note


# ---- the identity of a run: its version, experiment and model, equal at syncer and islands

WIRE_FORMAT = 6
"""The format of headers and encoded updates. Increase it with each change that the other side would
misread, such as another layout of a codec's words."""


class Identity(NamedTuple):
    """The version, experiment and model, which must be equal at syncer and islands."""

    version: str
    experiment: Mapping[str, Any]  # fields of the experiment by path
    model: Mapping[str, str]  # dtype and shape of each parameter by path
    wire_format: int = WIRE_FORMAT
    # hashes of files, by the field that names the file; None of islands
    content: Mapping[str, str] | None = None


def identify(
    experiment: Experiment,
    params: Params,
    content: Mapping[str, str] | None = None,
) -> Identity:
    """Return the identity of a run; `own_fields`, with all below them, may differ between sites."""
    # Of the training, every process has its own settings, or the default: see `check_read`.
    training = {f"training.{field.name}" for field in dataclasses.fields(experiment.training)}
    own = ("mesh", *getattr(experiment, "own_fields", ()), *training - {"training.seed"})
    fields = {
        path: value
        for path, value in flatten(to_json(experiment))
        if not any(path == name or path.startswith(f"{name}.") for name in own)
    }
    model = {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(params)
    }
    fields = json.loads(json.dumps(fields), parse_constant=str)  # messages have no infinity
    return Identity(fedpax.__version__, fields, model, content=content)


def find_difference(expected: Identity, other: Mapping[str, Any]) -> str | None:
    """Describe how an island's or a site's identity differs from the syncer's."""
    if other.get("version") != expected.version:
        return (
            f"this process has fedpax {str(other.get('version'))[:50]}, and the syncer has "
            f"{expected.version}. Install the same version on both sides."
        )
    if difference := find_other_format(other.get("wire_format"), expected.wire_format):
        return f"this process {difference}"
    for field, name, remedy in (
        ("experiment", "configuration", _same_flags(expected)),
        ("model", "model", "Use the same code and the same flags on both sides."),
        ("content", "content of files", "Use the same files on both sides."),
    ):
        ours, stated = getattr(expected, field) or {}, other.get(field)
        theirs = stated if isinstance(stated, dict) else {}
        paths = [path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)]
        if paths:
            shown = ", ".join(
                f"{path} is {theirs.get(path, 'missing')}, and {ours.get(path, 'missing')} at the "
                "syncer"
                for path in paths[:5]
            )
            more = f", and {len(paths) - 5} more differ" if len(paths) > 5 else ""
            return f"this process has another {name}: {shown[:1000]}{more}. {remedy}"
    return None


def _same_flags(expected: Identity) -> str:
    flags = "Give `fedpax join` the flags of `fedpax syncer`"
    if expected.content is None or is_within_fedpax(str(expected.experiment.get("class"))):
        return f"{flags}."
    return f"{flags}, or add a field that each site sets to own_fields of the experiment's class."


def find_other_format(stated: Any, expected: int = WIRE_FORMAT) -> str | None:
    """Describe a message format other than this side's; None if they are equal."""
    if type(stated) is int and stated == expected:
        return None
    shown = f"format {stated}" if type(stated) is int else "a format without a number"
    return (
        f"sends messages of {shown}, expected format {expected}. Install the same commit of "
        "fedpax on both sides."
    )
