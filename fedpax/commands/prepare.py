"""`fedpax prepare`: sort files by client once, into a folder that opens without being read."""

import functools
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from fedpax.commands.parts.file_flags import check_engine_flags, flags_in_errors, parse_files
from fedpax.console import count_of, print_error, print_line
from fedpax.data import prepare as prepare_files
from fedpax.errors import UsageError


@flags_in_errors()
def prepare(arguments: Sequence[str]) -> int:
    """Prepare files, and print what was written and which rows were skipped."""
    options, files, reading = parse_files("prepare", arguments)
    if not options.out:
        raise UsageError(
            "`fedpax prepare` has no --out, expected a new folder. Set for example "
            "--out=data/events."
        )
    prepared = _find_engine(options)(
        files if len(files) > 1 else files[0],
        options.out,
        on_bad_row=options.on_bad_row,
        memory=options.memory,
        heldout_fraction=options.heldout_fraction,
        heldout_by=options.heldout_by,
        **reading,
    )
    for path, count in prepared.skipped.items():
        first = prepared.first_skipped[path]
        print_error(f"Skipped {count_of(count, 'row')} of {path}, the first of them {first!r}.")
    clients = (
        "" if prepared.num_clients is None else f" of {count_of(prepared.num_clients, 'client')}"
    )
    print_line(f"Wrote {count_of(prepared.num_examples, 'example')}{clients} to {options.out}.")
    return 0


def _find_engine(options: flags.FlagValues) -> Callable[..., Any]:
    check_engine_flags(options)
    if options.engine is None:
        return prepare_files
    from fedpax.deploy.beam_prepare import prepare_beam

    beam_flags = shlex.split(options.beam_flags or "")
    return functools.partial(prepare_beam, num_shards=options.num_shards, flags=beam_flags)
