"""`--engine`: what runs the rounds in place of the compiled round of this process."""

import functools
import shlex

from absl import flags

from fedpax.deploy.batch_training import RunRounds
from fedpax.errors import UsageError

ENGINES = ("beam", "out_of_core")
CHUNK_SIZE = 16


def define_engine_flags(options: flags.FlagValues) -> None:
    """Define the flags of an engine."""
    flags.DEFINE_enum("engine", None, ENGINES, "The engine of the rounds.", flag_values=options)
    flags.DEFINE_string("beam_flags", None, "Flags of the pipeline.", flag_values=options)
    flags.DEFINE_integer(
        "chunk_size", None, "Clients in memory, out of core.", 1, flag_values=options
    )


def engine_of(options: flags.FlagValues) -> RunRounds | None:
    """Return the function that runs rounds on the engine; None: no engine is chosen."""
    for name, engine in (("beam_flags", "beam"), ("chunk_size", "out_of_core")):
        if options[name].value is not None and options.engine != engine:
            raise UsageError(
                f"--{name}={options[name].value} without --engine={engine}, expected both. Add "
                f"--engine={engine}."
            )
    if options.engine is None:
        return None
    if options.engine == "out_of_core":
        from fedpax.deploy.host_memory import run_out_of_core

        return functools.partial(run_out_of_core, chunk_size=options.chunk_size or CHUNK_SIZE)
    from fedpax.deploy.beam import run_beam

    return functools.partial(run_beam, flags=shlex.split(options.beam_flags or ""))
