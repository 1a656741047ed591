"""The process of a coordinator: asks the sites for each round, and saves the model after it."""

import copy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fedpax.errors import ArgumentError, ConfigurationError
from fedpax.run_files.paths import latest_round
from fedpax.sites.coordinator_rounds import Coordinator
from fedpax.sites.round_rules import RoundRules
from fedpax.sites.site_experiment import SiteExperiment
from fedpax.sites.site_files import (
    FEDERATION,
    read_federation,
    write_federation,
)
from fedpax.sites.site_process import (
    SyncerResult,
    end_serving,
    identify,
    items_of,
    locked_folder,
    serving,
)
from fedpax.sites.site_table import SiteTable
from fedpax.sites.task_exchange import TaskExchange
from fedpax.sites.tasks import new_token
from fedpax.training.experiment import Experiment
from fedpax.transport.admission import NO_LIMITS, Admission, SiteLimits
from fedpax.transport.optional_packages import signer_of

CALLS_OF_A_SITE = 8
"""Calls of a site at a time: it has two, and the calls of a process that was killed may remain."""


def run_coordinator(
    experiment: Experiment,
    job_log_dir: str | Path,
    listen: str,
    *,
    exp: str = "",
    certificates: str | Path | None = None,
    allow_config_change: Collection[str] = (),
    rules: RoundRules | None = None,
    heartbeat_seconds: float = 1.0,
    goodbye_seconds: float = 60.0,
    limits: SiteLimits = NO_LIMITS,
) -> SyncerResult:
    """Run the rounds of an experiment over sites that train on their own data."""
    rules = RoundRules() if rules is None else rules
    rules.check()
    _check_heartbeat(heartbeat_seconds, rules.silent_after)
    assert isinstance(experiment, SiteExperiment)
    check_supported(experiment)
    if rules.accept_if:
        copy.copy(experiment).describe_site()  # its data can be read
    with locked_folder(experiment, job_log_dir, "syncer", exp, allow_config_change) as folder:
        done, rounds = latest_round(folder) or 0, experiment.training.rounds
        admission = Admission(folder, limits)
        report = admission.report if certificates else None  # a stranger can claim any name
        sites = SiteTable(rules.silent_after, admission.is_expelled, rules.missed_rounds)
        exchange = _open_exchange(
            experiment, folder, rules, sites, _read_saved(folder, done), report, heartbeat_seconds
        )
        # Sites keep the run's name, also if this process ends before they agree.
        write_federation(folder, exchange, exchange.inputs)
        with serving(
            experiment,
            folder,
            exp,
            exchange.handle,
            listen,
            admission,
            done=done,
            item_unit=items_of(experiment)[0],
            certificates=certificates,
            max_message_bytes=lambda: exchange.max_message_bytes,
            max_calls_per_site=CALLS_OF_A_SITE,
        ) as (files, preemption):
            coordinator = Coordinator(
                experiment,
                folder,
                exchange,
                rules,
                checkpoints=files.checkpoints,
                metrics=files.metrics,
                progress=files.progress,
                stop=lambda: preemption.signal is not None,
                done=done,
                signer=signer_of(certificates) if rules.secure_sums else None,
            )
            coordinator.run()
            if coordinator.done >= rounds:
                coordinator.say_goodbye(goodbye_seconds)
            return end_serving(files, preemption, coordinator.done, coordinator.done >= rounds)


def _open_exchange(
    experiment: Any,
    folder: Path,
    rules: RoundRules,
    sites: SiteTable,
    saved: Mapping[str, Any] | None,
    report: Callable[[str, str], None] | None,
    heartbeat_seconds: float,
) -> TaskExchange:
    """Make the exchange of a new run or of a saved one."""
    exchange = TaskExchange(
        identify(experiment, {}, experiment.shared_content()),
        sites,
        rounds=experiment.training.rounds,
        run=new_token() if saved is None else saved["run"],
        on_fault=report or (lambda name, reason: None),
        heartbeat_seconds=heartbeat_seconds,
        down=rules.down,
        folder=folder / "replies",
        clients_per_site=rules.clients_per_site,
    )
    if saved is not None:
        sites.restore(saved["sites"])
        exchange.inputs, exchange.agreed = saved["inputs"], saved.get("agreed")
        exchange.opened = saved.get("opened", {})
    return exchange


def _check_heartbeat(seconds: float, silent_after: float) -> None:
    if seconds >= silent_after:
        raise ArgumentError(
            f"heartbeat_seconds={seconds} and silent_after={silent_after}: a site would be silent "
            "between two heartbeats, expected fewer seconds. Set for example "
            f"--heartbeat_seconds={silent_after / 4:g}."
        )


def _read_saved(folder: Path, done: int) -> dict[str, Any] | None:
    """Return the saved run and sites of a folder; None in a new one."""
    saved = read_federation(folder)
    if done and saved is None:
        raise ConfigurationError(
            f"{folder} has checkpoints, but no {FEDERATION}, expected the run of a syncer. Give "
            "another --job_log_dir, or restore the file from a copy."
        )
    return saved


def check_supported(experiment: Experiment) -> None:
    """Raise where a setting of the training has no effect over sites."""
    read = ("checkpoint_dir", "keep_checkpoints", "tracker", "track_checkpoints")
    experiment.training.check_read(read, "rounds over sites")
