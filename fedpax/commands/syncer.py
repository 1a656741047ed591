"""`fedpax syncer`: serve the outer model of an experiment to islands that join."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from fedpax.commands.parts.options import (
    UsageError,
    allowed_changes,
    define_training_flags,
    parse_run,
)
from fedpax.console import print_line
from fedpax.training.experiment import Experiment

if TYPE_CHECKING:  # after JAX_PLATFORMS is set
    from fedpax.sites.syncer_result import SyncerResult


def syncer(arguments: Sequence[str]) -> int:
    """Serve the outer model until all merges are done, and print the result."""
    options, experiment, folder = parse_run("syncer", arguments, define_flags)
    if not options.listen:
        raise UsageError(
            "`fedpax syncer` has no --listen, expected the address for islands. Give for example "
            "--listen=127.0.0.1:7000, or with --certificates --listen=0.0.0.0:7000."
        )
    # The outer model is in the host's memory: leave accelerators to other programs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from fedpax.commands.parts.compilation_cache import enable_compilation_cache
    from fedpax.sites.syncer.guarded_merge import GuardRules
    from fedpax.sites.syncer.run_syncer import run_syncer
    from fedpax.sites.transport.admission import SiteLimits

    enable_compilation_cache()
    limits = SiteLimits(options.messages_per_minute, options.bytes_per_minute)
    if has_rounds_over_sites(experiment):
        from fedpax.sites.rounds.round_rules import RoundRules
        from fedpax.sites.rounds.run_coordinator import run_coordinator

        result = run_coordinator(
            experiment,
            folder,
            options.listen,
            exp=options.exp,
            certificates=options.certificates,
            allow_config_change=allowed_changes(options),
            rules=RoundRules(
                options.min_sites,
                options.round_seconds,
                options.weights,
                options.silent_after,
                options.norm_factor,
                options.accept_if,
                options.secure_sums,
                options.secure_threshold,
                options.down,
                options.up,
                options.missed_rounds,
                options.clients_per_site,
            ),
            heartbeat_seconds=options.heartbeat_seconds,
            goodbye_seconds=options.goodbye_seconds,
            limits=limits,
        )
        return _report(result, experiment, options.job_log_dir)
    result = run_syncer(
        experiment,
        folder,
        options.listen,
        exp=options.exp,
        certificates=options.certificates,
        allow_config_change=allowed_changes(options),
        heartbeat_seconds=options.heartbeat_seconds,
        free_shard_after=options.free_shard_after,
        islands_per_certificate=options.islands_per_certificate,
        goodbye_seconds=options.goodbye_seconds,
        allow_older_state=options.allow_older_state,
        limits=limits,
        guards=GuardRules(options.norm_factor, options.accept_if),
    )
    return _report(result, experiment, options.job_log_dir)


def has_rounds_over_sites(experiment: Experiment) -> bool:
    """Tell whether an experiment runs in synchronous rounds over sites with data of their own."""
    from fedpax.sites.rounds.contract import SiteExperiment

    return isinstance(experiment, SiteExperiment)


def _report(result: "SyncerResult", experiment: Experiment, folder: str) -> int:
    stopped, completed = result.signal, f"{result.rounds} of {experiment.training.rounds} rounds"
    if stopped is not None:
        print_line(
            f"{stopped.name}: every merge so far is saved in {folder}, {completed}. Run the same "
            "command again to resume."
        )
        return 128 + stopped
    print_line(f"Finished {completed} in {folder}.")
    return 0


def define_flags(options: flags.FlagValues) -> None:
    """Define the flags of the command."""
    define_training_flags(options)
    flags.DEFINE_string("listen", None, "HOST:PORT to listen at.", flag_values=options)
    flags.DEFINE_string("certificates", None, "The certificate's folder.", flag_values=options)
    flags.DEFINE_float(
        "heartbeat_seconds",
        1.0,
        "Seconds between the heartbeats of an island or a site.",
        lower_bound=0.05,
        flag_values=options,
    )
    flags.DEFINE_float(
        "free_shard_after",
        1800.0,
        "Seconds without a message of an island after which another island can take its shard.",
        lower_bound=0.0,
        flag_values=options,
    )
    flags.DEFINE_integer(
        "islands_per_certificate",
        1,
        "The most islands of one certificate; they count once in a quorum and in a median.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_float(
        "goodbye_seconds",
        15.0,
        "Seconds after the end in which islands can learn it.",
        lower_bound=0.0,
        flag_values=options,
    )
    for unit in ("messages", "bytes"):
        flags.DEFINE_float(
            f"{unit}_per_minute",
            math.inf,
            f"The most {unit} that a site may send in a minute; beyond them it is muted.",
            lower_bound=1.0,
            flag_values=options,
        )
    flags.DEFINE_boolean(
        "allow_older_state",
        False,
        "Continue from a saved state that is older than the newest merge, such as a copy.",
        flag_values=options,
    )
    _define_round_flags(options)


def _define_round_flags(options: flags.FlagValues) -> None:
    """Define the flags of rounds over sites with data of their own."""
    flags.DEFINE_integer(
        "min_sites",
        2,
        "Sites that the first round waits for, and that each round needs.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_float(
        "round_seconds",
        600.0,
        "Seconds after which a round waits for no further site.",
        lower_bound=0.1,
        flag_values=options,
    )
    flags.DEFINE_integer(
        "missed_rounds",
        3,
        "Deadlines that a site misses until no round waits for it; an answered round takes one "
        "back.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_integer(
        "clients_per_site",
        10_000,
        "The most clients of a site in rounds.",
        lower_bound=1,
        flag_values=options,
    )
    flags.DEFINE_float(
        "silent_after",
        30.0,
        "Seconds without a message of a site after which no round waits for it.",
        lower_bound=1.0,
        flag_values=options,
    )
    flags.DEFINE_float(
        "norm_factor",
        None,
        "Drop a site's reply whose norm is above so many medians of recent norms.",
        lower_bound=0.0,
        flag_values=options,
    )
    flags.DEFINE_string(
        "accept_if",
        None,
        "Drop replies that harm the model on the coordinator's data, by a rule: loss+0.01.",
        flag_values=options,
    )
    flags.DEFINE_boolean(
        "secure_sums",
        False,
        "Learn the sums of what sites send alone.",
        flag_values=options,
    )
    flags.DEFINE_integer(
        "secure_threshold",
        None,
        "Sites that have to stay in a secure sum; default: one more than half.",
        lower_bound=2,
        flag_values=options,
    )
    flags.DEFINE_string(
        "weights",
        "examples",
        "What a client weighs: examples, equal, or capped:N, at most N examples.",
        flag_values=options,
    )
    for way, what in (("down", "what all sites receive"), ("up", "the sums that sites send")):
        flags.DEFINE_string(
            way,
            "float32",
            f"Codec of {what} in rounds: float32, e3m0, drive or sign.",
            flag_values=options,
        )
