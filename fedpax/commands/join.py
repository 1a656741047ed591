"""`fedpax join`: train one island of an experiment, which a syncer merges with others."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from absl import flags

from fedpax.commands.parts.devices import enable_compilation_cache
from fedpax.commands.parts.options import (
    UsageError,
    allowed_changes,
    parse_run,
)
from fedpax.commands.parts.processes import leave_on_failure, provide_processes
from fedpax.console import count_of, print_line
from fedpax.processes.job_processes import JobProcessesError
from fedpax.run_files.paths import latest_round
from fedpax.sites.site_experiment import SiteExperiment

GAVE_UP = 75  # EX_TEMPFAIL of sysexits.h: the same command can succeed later

if TYPE_CHECKING:
    from fedpax.sites.site_process import JoinResult


def join(arguments: Sequence[str]) -> int:
    """Train an island until its syncer has finished, and print the result."""
    options, experiment, folder = parse_run("join", arguments)
    if not options.syncer:
        raise UsageError(
            "`fedpax join` has no --syncer, expected the address of a `fedpax syncer`. Give for "
            "example --syncer=127.0.0.1:7000."
        )
    enable_compilation_cache()
    if isinstance(experiment, SiteExperiment):
        return _take_part(options, experiment, folder)
    with leave_on_failure():
        provide_processes(
            options,
            dataclasses.replace(experiment, mesh=dataclasses.replace(experiment.mesh, islands=1)),
        )
        from fedpax.islands.island.join import join as join_syncer

        try:
            result = join_syncer(
                experiment,
                folder,
                options.syncer,
                shard=options.shard,
                heartbeat_timeout=options.heartbeat_timeout,
                **_common(options),
            )
        except JobProcessesError as error:
            raise UsageError(f"--multihost: {error}") from None
    if jax.process_index() == 0:
        print_line(describe(result, options.job_log_dir, options.syncer))
    return _status_of(result)


def _take_part(options: flags.FlagValues, experiment: Any, folder: Path) -> int:
    """Train on this site's own data, and print the result."""
    from fedpax.sites.take_part import take_part

    result = take_part(
        experiment,
        folder,
        options.syncer,
        only_sums_of=options.only_sums_of,
        personal=options.personal,
        no_metrics=options.no_metrics,
        **_common(options),
    )
    has_model = latest_round(folder) is not None
    print_line(describe_site(result, options.job_log_dir, options.syncer, has_model=has_model))
    return _status_of(result)


def _status_of(result: "JoinResult") -> int:
    if result.gave_up and not result.finished:
        return GAVE_UP
    return 0 if result.signal is None else 128 + result.signal


def _common(options: flags.FlagValues) -> dict[str, Any]:
    """Return the arguments of both ways of joining a syncer."""
    names = ("exp", "name", "certificates", "server_name", "give_up_after")
    arguments: dict[str, Any] = {name: options[name].value for name in names}
    return {**arguments, "allow_config_change": allowed_changes(options)}


START_AGAIN = (
    "Start the syncer, then run the same command again. A syncer whose run is finished tells it "
    "for --goodbye_seconds when it is started again."
)


def describe_site(result: "JoinResult", folder: str, syncer: str, *, has_model: bool) -> str:
    """Describe the result of a site with data of its own in words."""
    saved = f"{'the model is saved' if has_model else 'no model was received'} in {folder}"
    done = f"this site took part in {count_of(result.rounds, 'round')}"
    return _describe(result, syncer, done, saved) or f"Finished: {done}; {saved}."


def describe(result: "JoinResult", folder: str, syncer: str) -> str:
    """Describe the result of an island in words."""
    verb = "is" if result.rounds == 1 else "are"
    done = f"{count_of(result.rounds, 'round')} of this island {verb} saved in {folder}"
    finished = f"Finished: the syncer has done all merges; {done}."
    return _describe(result, syncer, done, done) or finished


def _describe(result: "JoinResult", syncer: str, done: str, saved: str) -> str:
    """Describe a result before the end, or return ""."""
    if result.gave_up and result.finished:
        return (
            f"Finished before: {saved}. No syncer answers at {syncer}; if it has more rounds, "
            "start it first, then run the same command again."
        )
    if result.gave_up:
        return f"Stopped: no syncer answers at {syncer}; {done}. {START_AGAIN}"
    if result.signal is not None:
        return f"{result.signal.name}: {done}. Run the same command again to return."
    return ""
