"""`--engine`: what runs the rounds in place of the compiled round of this process."""

import functools
import shlex
from typing import TYPE_CHECKING

from absl import flags

from fedpax.errors import UsageError

if TYPE_CHECKING:  # `fedpax prepare` starts without it
    from fedpax.deploy.batch_training import RunRounds

CHUNK_SIZE = 16
# The engine that each flag sets up.
_SETTINGS = {
    "beam_flags": "beam",
    "num_shards": "beam",
    "chunk_size": "out_of_core",
    "flower_flags": "flower",
}


def check_engine_flags(options: flags.FlagValues) -> None:
    """Check that no flag of an engine is given without this engine."""
    for name, engine in _SETTINGS.items():
        value = options[name].value if name in options else None
        if value is not None and options.engine != engine:
            raise UsageError(
                f"--{name}={value} without --engine={engine}, expected both. Add --engine={engine}."
            )


def engine_of(options: flags.FlagValues) -> "RunRounds | None":
    """Return the function that runs rounds as batch jobs; None: no engine for them is chosen."""
    check_engine_flags(options)
    if options.engine == "out_of_core":
        from fedpax.deploy.out_of_core_rounds import run_out_of_core

        return functools.partial(run_out_of_core, chunk_size=options.chunk_size or CHUNK_SIZE)
    if options.engine == "beam":
        from fedpax.deploy.beam import run_beam

        return functools.partial(run_beam, flags=shlex.split(options.beam_flags or ""))
    return None
