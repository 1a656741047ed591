"""`fedpax plan`: compile a round without the hardware, and report its costs."""

import json
import math
from collections.abc import Sequence

from fedpax.commands.parts.options import configure, parse
from fedpax.commands.parts.output_files import output_file
from fedpax.console import print_error
from fedpax.errors import UsageError
from fedpax.planning import (
    MemoryOverflowError,
    find_topology,
    plan_experiment,
    to_json,
    to_text,
)
from fedpax.planning.ahead_of_time import overflow_report
from fedpax.run_files.paths import write_atomically


def plan(arguments: Sequence[str]) -> int:
    """Plan an experiment, print the report, and write the files that the flags name."""
    options, fields = parse("plan", arguments)
    experiment = configure(options.exp, fields, command="plan")
    if not options.topology:
        raise UsageError(
            "--topology is missing, expected the devices to plan for. Set for example "
            "--topology=v5p:4x4x4 or --topology=cpu:8."
        )
    picture = output_file("picture", options.picture, ".png")
    report = output_file("json", options.json)
    program = output_file("hlo", options.hlo)
    if options.bandwidth is not None and not 0 < options.bandwidth < math.inf:
        raise UsageError(
            f"--bandwidth={options.bandwidth:g}: expected Gbit/s out of a slice, above 0. Set for "
            "example --bandwidth=100, or leave it out for the published bandwidth of the chips."
        )
    if options.bandwidth is not None and options.slices == 1:
        raise UsageError(
            f"--bandwidth={options.bandwidth:g} is the bandwidth between slices, but there is one "
            "slice. Set --slices=2 or more, or leave --bandwidth out."
        )
    topology = find_topology(options.topology, options.slices)
    result, run = plan_experiment(
        experiment,
        topology,
        exp=options.exp,
        slice_bandwidth=None if options.bandwidth is None else options.bandwidth * 1e9 / 8,
        program_file=program,
        progress=print_error,
    )
    print(to_text(result), end="")
    if report:
        write_atomically(report, json.dumps(to_json(result), indent=2) + "\n")
    if picture:
        from fedpax.planning.draw_mesh import draw_mesh

        draw_mesh(result, run.mesh, picture)
    if result.memory.fits is False:
        memory = result.memory
        shortage = f"needs {memory.total / 2**30:.2f}G of {(memory.capacity or 0) / 2**30:.2f}G"
        raise MemoryOverflowError(overflow_report(options.exp, topology, experiment, run, shortage))
    return 0
