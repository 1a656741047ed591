"""The processes of an island."""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpax.algorithm import Params
from fedpax.console import count_of, print_error
from fedpax.errors import ConfigurationError
from fedpax.files import describe_no_permission, read_json, replace_file
from fedpax.islands.fragment_format import largest_fragment
from fedpax.islands.island.island import Island, SharedLink
from fedpax.islands.island.link import JoinReply, Link
from fedpax.islands.island.local_model import LocalModel
from fedpax.islands.island.training_rounds import IslandLog, ShardPrefetch, TrainingRounds
from fedpax.islands.method_parts import build_parts, parts_of, shorten, tokens_per_step
from fedpax.preemption import PreemptionGuard
from fedpax.processes.communication import ControlChannel
from fedpax.run_files.configuration import write_configuration
from fedpax.run_files.paths import latest_round
from fedpax.sites.site_process import (
    SECONDS_TO_ASK_AGAIN,
    JoinResult,
    identify,
    locked_folder,
    patience,
)
from fedpax.training.agreement import check_same_data
from fedpax.training.experiment import Experiment, Run
from fedpax.training.progress import describe_devices
from fedpax.training.run_writers import RunFiles, open_files
from fedpax.training.startup_report import check_processes
from fedpax.transport.calls import Connection, connect

PROCESS_ENDED = 75  # EX_TEMPFAIL of sysexits.h: the same command can succeed later


def join(
    experiment: Experiment,
    job_log_dir: str | Path,
    syncer: str,
    *,
    exp: str = "",
    name: str | None = None,
    shard: int | None = None,
    certificates: str | Path | None = None,
    server_name: str | None = None,
    allow_config_change: Collection[str] = (),
    give_up_after: float = 600.0,
    heartbeat_timeout: float = 100.0,
) -> JoinResult:
    """Train one island of an experiment, which a syncer merges with others.

    The island has its own devices and shard of the data, and exchanges fragments during the steps.
    Without an answer the island trains on for `max_steps_ahead` steps, waits for up to
    `give_up_after` seconds, saves its state and stops.

    The number of rounds is the syncer's: `training.rounds` has no effect.

    The processes of `jax.distributed` form one island: all of them must call this function, with
    one folder. If one ends or is silent, the others exit with status 75.

    The folder gets `config.json`, `metrics.jsonl`, `tensorboard/`, `checkpoints/` and
    `island.json`. An island that is killed returns with its shard, its last checkpoint and the
    newest outer model.

    Args:
        experiment: the experiment. Its mesh is the mesh of this island; `islands` is set to 1.
        job_log_dir: this island's folder.
        syncer: the syncer's `HOST:PORT`.
        exp: the experiment's name on the command line, recorded in `config.json`.
        name: the island's name. Default None: the name of its folder.
        shard: the shard of the data. Default None: the syncer's choice.
        certificates: the folder of this site's certificate. Default None: no encryption.
        server_name: the name in the syncer's certificate. Default None: the host of `syncer`.
        allow_config_change: as in `fedpax.training.trainer.train`.
        give_up_after: seconds without an answer after which a waiting island stops.
        heartbeat_timeout: the limit of `jax.distributed` for a silent process, in seconds.

    Returns:
        The number of rounds of this island, and the reason for which the call stopped.

    Raises:
        ConfigurationError: the folder holds another configuration, or another process uses it; or
            the method cannot be divided into parts.
        RefusedError: the syncer refuses this island, for example for another experiment.
        NonFiniteError: the loss is not finite, and `training.stop_on_non_finite` is True.
        OSError: the certificates cannot be read.
        ValueError: the address is malformed, or certificates are missing or cannot be used.
    """
    with (
        locked_folder(experiment, job_log_dir, "join", exp, allow_config_change) as folder,
        ControlChannel(_exit_after(folder), 0.4 * heartbeat_timeout) as channel,
    ):
        member = Member(**channel.broadcast(read_member(folder)._asdict()))
        header = {
            "island": name or folder.name,
            "incarnation": secrets.token_hex(8),
            "folder": member.folder,
            "run": member.run,
            "shard": shard,
        }
        header = channel.broadcast(header)
        with contextlib.ExitStack() as stack:
            connection = None
            if channel.is_first:
                connection = connect(syncer, certificates=certificates, server_name=server_name)
                stack.callback(connection.close)
            return _join(
                experiment,
                folder,
                connection,
                channel,
                header,
                exp,
                syncer,
                give_up_after,
                has_finished=member.finished,
            )


def _join(
    experiment: Experiment,
    folder: Path,
    connection: Connection | None,
    channel: ControlChannel,
    header: dict[str, Any],
    exp: str,
    syncer: str,
    give_up_after: float,
    *,
    has_finished: bool,
) -> JoinResult:
    """Open the files of the island, join the syncer, and train."""
    started, first, is_first = time.perf_counter(), latest_round(folder) or 0, channel.is_first
    run = _build(experiment, exp)
    check_processes(island_of(experiment), run)
    params = jax.eval_shape(run.init, jax.random.key(0))
    header["identity"] = identify(experiment, params)._asdict()
    header["data"] = shorten(check_same_data(run.cohorts))
    preemption = PreemptionGuard()
    with (
        jax.set_mesh(run.mesh),
        open_files(
            experiment, folder, exp, first, run.item_unit, header["island"], enabled=is_first
        ) as files,
        files.metrics,
        contextlib.ExitStack() as stack,
    ):
        progress, model = files.progress, LocalModel(run)
        header["steps_before"] = first * len(model.formats) * parts_of(run).steps_per_sync
        position: Any = files.checkpoints.restore_position().stream if first else {}
        link = _make_link(folder, connection, header, model, position.get("ledger"))
        exchange = SharedLink(link, channel, preemption)
        stack.callback(exchange.close)
        ask_for = min(give_up_after, SECONDS_TO_ASK_AGAIN) if has_finished else give_up_after
        reply = exchange.join(patience(progress), ask_for)
        if reply is None:
            stopped = preemption.signal
            finished = stopped is None and read_member(folder).finished
            return JoinResult(first, finished, stopped, gave_up=stopped is None)
        if reply.shard is not None:
            progress.note(f"joined {syncer} with shard {reply.shard} of {parts_of(run).islands}")
        header["run"] = reply.run
        if is_first:  # before the threads start, which can record the end
            write_member(folder, Member(header["folder"], reply.run, reply.finished))
        if reply.finished:
            return JoinResult(first, True, None)
        exchange.start()  # already now, because data and compilation take long
        if reply.rounds != experiment.training.rounds:
            progress.note(f"the run has {count_of(reply.rounds, 'round')} at the syncer")
            progress.set_rounds(reply.rounds)
            training = dataclasses.replace(experiment.training, rounds=reply.rounds)
            experiment = dataclasses.replace(experiment, training=training)
            run = _build(experiment, exp)
            model = LocalModel(run)
        island = _make_island(run, model, exchange, reply, header, files, position, first)
        if is_first:
            write_configuration(folder, experiment, exp)
        log = _make_log(experiment, run, params, files, exchange, started, folder)
        frozen = () if run.frozen is None else (run.frozen.load(),)
        rounds = TrainingRounds(
            experiment, parts_of(run), island, exchange, files, log, first, give_up_after
        )
        with _open_data(experiment, exp, run, island.shard, position) as data, preemption:
            rounds.train(data, *frozen)
        files.checkpoints.wait()
        files.tracker.finished = finished = island.status.finished
        gave_up = rounds.gave_up and not island.must_stop()
    return JoinResult(rounds.done, finished, None if finished else preemption.signal, gave_up)


def _build(experiment: Experiment, exp: str) -> Run:
    return build_parts(experiment, island_of(experiment).mesh, exp)


def _make_link(
    folder: Path,
    connection: Connection | None,
    header: dict[str, Any],
    model: LocalModel,
    ledger: dict[str, Any] | None,
) -> Link | None:
    """Make the link of process 0, which knows the versions of a saved ledger."""
    if connection is None:
        return None
    connection.max_message_bytes = largest_fragment(model.formats)
    versions, epoch = [-1] * len(model.formats), None
    if ledger is not None:
        versions = [fragment["version"] for fragment in ledger["fragments"]]
        epoch = ledger.get("epoch")

    def record_end() -> None:
        # Before the syncer is told, and exits: an island that is killed then would wait for it in
        # vain. The answer to the first `join` is recorded later, with its run.
        if header["run"] is not None:
            write_member(folder, Member(header["folder"], header["run"], finished=True))

    return Link(connection.call, header, model.formats, versions, record_end, epoch)


def _make_island(
    run: Run,
    model: LocalModel,
    exchange: SharedLink,
    reply: JoinReply,
    header: dict[str, Any],
    files: RunFiles,
    position: dict[str, Any],
    first: int,
) -> Island:
    """Make the island, and restore its state after round `first`."""
    assert reply.shard is not None  # unless the run is finished
    island = Island(
        parts_of(run),
        model,
        exchange,
        shard=reply.shard,
        process=header["incarnation"],
        tokens_per_step=tokens_per_step(run, parts_of(run), len(model.formats)),
        on_discard=lambda steps: files.progress.note(
            f"the syncer has restored an older state: discards {steps} unsent steps, and takes "
            "its model"
        ),
    )
    if first:
        files.progress.note(f"resuming after its round {first}")
        state = files.checkpoints.restore_state(model.shapes, parts_of(run).islands)
        island.restore(state, position["ledger"], reply.received)
    return island


def _make_log(
    experiment: Experiment,
    run: Run,
    params: Params,
    files: RunFiles,
    exchange: SharedLink,
    started: float,
    folder: Path,
) -> IslandLog:
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    files.progress.note(f"{size:,} parameters on {describe_devices(run.mesh)}; folder {folder}")
    items_per_round = run.items_per_round // parts_of(run).islands
    files.metrics.write_sizes(size, 1, run.item_unit, items_per_round)
    return IslandLog(
        files.metrics,
        files.progress,
        transferred_bytes=lambda: exchange.transferred_bytes,
        started=started,
        items_per_round=items_per_round,
        stop_on_non_finite=experiment.training.stop_on_non_finite,
    )


def _open_data(
    experiment: Experiment, exp: str, run: Run, shard: int, position: dict[str, Any]
) -> ShardPrefetch:
    """Open the data of a shard, at the saved position if the island returns with its shard."""
    return ShardPrefetch(
        run.cohorts,
        lambda: _build(experiment, exp).cohorts,
        run.resolved_shardings.cohort,
        shard,
        position["stream"] if position.get("shard") == shard else None,
    )


def island_of(experiment: Experiment) -> Experiment:
    """Return the experiment on the mesh of one island: stated sizes of its other axes are kept."""
    return dataclasses.replace(experiment, mesh=dataclasses.replace(experiment.mesh, islands=1))


def _exit_after(folder: Path) -> Callable[[str], None]:
    """Return a function that ends this process, because another one of the island has ended."""

    def end(reason: str) -> None:
        kept = latest_round(folder)
        print_error(
            f"fedpax: {reason}, and without it the island cannot train. Read its log, then start "
            "all processes of the island again: it returns with "
            f"{f'the state after its round {kept}' if kept else 'the newest outer model'}."
        )
        os._exit(PROCESS_ENDED)  # the main thread may wait for the devices forever

    return end


# ---- `island.json`, by which an island's folder keeps its identity and its run

MEMBER_FILE = "island.json"
_writing = threading.Lock()  # two writers of a file would share its draft


class Member(NamedTuple):
    """The content of `island.json`: the folder's identity, its run, and whether it is finished."""

    folder: str
    run: str | None = None
    finished: bool = False


def read_member(folder: Path) -> Member:
    """Read `island.json` of an island's folder; a new identity if there is no file."""
    path = folder / MEMBER_FILE
    if not path.exists():
        return Member(secrets.token_hex(8))
    try:
        return Member(**read_json(path))
    except PermissionError as error:
        raise ConfigurationError(describe_no_permission(path)) from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({type(error).__name__}: {error}), expected the file that "
            "`fedpax join` writes. Restore it from a copy, or delete it and start the same command "
            "again: the syncer then takes the folder for a new one."
        ) from error


def write_member(folder: Path, member: Member) -> None:
    """Write `island.json`, for this user alone. Several threads may do so."""
    with _writing:
        content = (json.dumps(member._asdict()) + "\n").encode()
        replace_file(folder / MEMBER_FILE, content, mode=0o600)
