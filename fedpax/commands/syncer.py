"""`fedpax syncer`: serve the outer model of an experiment to islands that join."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from fedpax.commands.parts.options import (
    UsageError,
    allowed_changes,
    parse_run,
)
from fedpax.console import count_of, print_line
from fedpax.training.experiment import Experiment

if TYPE_CHECKING:  # after JAX_PLATFORMS is set
    from fedpax.sites.site_process import SyncerResult


def syncer(arguments: Sequence[str]) -> int:
    """Serve the outer model until all merges are done, and print the result."""
    options, experiment, folder = parse_run("syncer", arguments)
    if not options.listen:
        raise UsageError(
            "`fedpax syncer` has no --listen, expected the address for islands. Give for example "
            "--listen=127.0.0.1:7000, or with --certificates --listen=0.0.0.0:7000."
        )
    # The outer model is in the host's memory: leave accelerators to other programs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for processes that it starts
    if not jax.config.values["jax_platforms"]:  # JAX read the environment when it was imported
        jax.config.update("jax_platforms", "cpu")
    from fedpax.commands.parts.devices import enable_compilation_cache
    from fedpax.islands.syncer.merge_votes import GuardRules
    from fedpax.islands.syncer.run_syncer import run_syncer
    from fedpax.sites.site_experiment import SiteExperiment
    from fedpax.transport.admission import SiteLimits

    enable_compilation_cache()
    names = ("exp", "certificates", "heartbeat_seconds", "goodbye_seconds")
    common: dict[str, Any] = {name: options[name].value for name in names} | {
        "allow_config_change": allowed_changes(options),
        "limits": SiteLimits(options.messages_per_minute, options.bytes_per_minute),
    }
    if isinstance(experiment, SiteExperiment):
        from fedpax.sites.round_rules import RoundRules
        from fedpax.sites.run_coordinator import run_coordinator

        rules: dict[str, Any] = {name: options[name].value for name in RoundRules._fields}
        result = run_coordinator(
            experiment, folder, options.listen, rules=RoundRules(**rules), **common
        )
        return _report(result, experiment, options.job_log_dir)
    result = run_syncer(
        experiment,
        folder,
        options.listen,
        free_shard_after=options.free_shard_after,
        islands_per_certificate=options.islands_per_certificate,
        allow_older_state=options.allow_older_state,
        guards=GuardRules(options.norm_factor, options.accept_if),
        **common,
    )
    return _report(result, experiment, options.job_log_dir)


def _report(result: "SyncerResult", experiment: Experiment, folder: str) -> int:
    rounds = count_of(experiment.training.rounds, "round")
    stopped, completed = result.signal, f"{result.rounds} of {rounds}"
    if stopped is not None:
        print_line(
            f"{stopped.name}: every merge so far is saved in {folder}, {completed}. Run the same "
            "command again to resume."
        )
        return 128 + stopped
    print_line(f"Finished {completed} in {folder}.")
    return 0
