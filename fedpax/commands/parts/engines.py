"""`--engine`: the batch engine that runs the rounds in place of this process."""

import functools
import shlex

from absl import flags

from fedpax.deploy.batch_training import RunRounds
from fedpax.errors import UsageError

ENGINES = ("beam",)


def define_engine_flags(options: flags.FlagValues) -> None:
    """Define the flags of an engine."""
    flags.DEFINE_enum("engine", None, ENGINES, "The engine of the rounds.", flag_values=options)
    flags.DEFINE_string("beam_flags", None, "Flags of the pipeline.", flag_values=options)


def engine_of(options: flags.FlagValues) -> RunRounds | None:
    """Return the function that runs rounds on the engine; None: no engine is chosen."""
    if options.engine is None:
        if options.beam_flags is not None:
            raise UsageError(
                f"--beam_flags={options.beam_flags!r} without --engine=beam, expected both. Add "
                "--engine=beam."
            )
        return None
    from fedpax.deploy.beam import run_beam

    return functools.partial(run_beam, flags=shlex.split(options.beam_flags or ""))
