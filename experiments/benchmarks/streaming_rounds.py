"""Local steps of Streaming DiLoCo against those of DiLoCo: time and memory.

    python -m fedpax.experiments.benchmarks.streaming_rounds --clock=cpu

Both train the same model with AdamW, on the same batches, with an island on each simulated device,
and send float32 or 4 bits. The time of a local step is that of a round divided by its steps,
transfers included. The memory is what the compiler allocates on a device: state, batches and
temporaries.

Beside the state of DiLoCo, an island keeps its own model from one round to the next. In DiLoCo it
has one during a round. So Streaming DiLoCo may need at most as much more as the outer state has:
the outer model, and the momentum of the outer optimizer. On a busy machine, `--clock=cpu` measures
the CPU time of the process in place of wall-clock time.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from fedpax.experiments.benchmarks.timing import (
    CLOCKS,
    interleaved,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.diloco_text import OuterConfig, diloco_text
from fedpax.experiments.streaming_diloco_text import StreamingConfig, streaming_diloco_text
from fedpax.experiments.text import TextExperiment
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.compiled_round import compile_round, init_state, with_shardings
from fedpax.training.experiment import Run

ISLANDS = 2


class Row(NamedTuple):
    """A local step of both methods, with one format of what they send.

    Attributes:
        sent: "float32" or "4 bits".
        diloco_seconds: seconds of a round of DiLoCo divided by its local steps, for each round.
        streaming_seconds: likewise of Streaming DiLoCo.
        ratio: seconds of Streaming DiLoCo divided by those of DiLoCo (paired); None if nothing ran.
        diloco_bytes: bytes of DiLoCo on a device: arguments, results that do not reuse their
            memory, and temporaries.
        streaming_bytes: likewise of Streaming DiLoCo.
        outer_state_bytes: bytes of the outer model and of the outer optimizer's momentum.
    """

    sent: str
    diloco_seconds: list[float]
    streaming_seconds: list[float]
    ratio: float | None
    diloco_bytes: int
    streaming_bytes: int
    outer_state_bytes: int


def experiments(
    model: str, local_steps: int, batch_size: int, seq_len: int, delay: int
) -> dict[str, tuple[TextExperiment, TextExperiment]]:
    """Return the experiments with DiLoCo and with Streaming DiLoCo, by the format that they send.

    Args:
        model: name of a function of `fedpax.models.presets`.
        local_steps: H, a multiple of the fragments: one for each layer, and one more.
        batch_size: rows in a step of an island.
        seq_len: tokens in a row.
        delay: local steps between the start of a transfer and its use.
    """
    config = getattr(presets, model)()

    def sized(base: Any, **settings: Any) -> TextExperiment:
        sizes = {"local_steps": local_steps, "batch_size": batch_size, "seq_len": seq_len}
        return dataclasses.replace(
            base,
            islands=ISLANDS,
            mesh=MeshConfig(islands=ISLANDS),
            model=config,
            data=dataclasses.replace(base.data, **sizes),
            **settings,
        )

    streaming = StreamingConfig(fragments=config.num_layers + 1, delay=delay)
    full = dataclasses.replace(streaming, compression="float32")
    return {
        "float32": (
            sized(diloco_text(), outer=OuterConfig()),
            sized(streaming_diloco_text(), streaming=full),
        ),
        "4 bits": (
            sized(diloco_text(), outer=OuterConfig(num_levels=16)),
            sized(streaming_diloco_text(), streaming=streaming),
        ),
    }


def measure(
    model: str,
    local_steps: int,
    batch_size: int,
    seq_len: int,
    delay: int,
    repetitions: int,
    clock: str = "wall",
) -> list[Row]:
    """Compile a round of each method, and time interleaved rounds, on two devices of this process.

    Args:
        model: name of a function of `fedpax.models.presets`.
        local_steps: as in `experiments`.
        batch_size: as in `experiments`.
        seq_len: as in `experiments`.
        delay: as in `experiments`.
        repetitions: number of timed rounds of each method; 0: compile only.
        clock: a name in `CLOCKS`.

    Returns:
        A row for each format.
    """
    rows = []
    for sent, pair in experiments(model, local_steps, batch_size, seq_len, delay).items():
        calls, memory, outer = {}, {}, 0
        for name, experiment in zip(("diloco", "streaming"), pair, strict=True):
            run = experiment.build()
            with jax.set_mesh(run.mesh):
                (memory[name], outer), calls[name] = _compile(run, start=repetitions > 0)
        taken = interleaved(calls, (), repetitions, CLOCKS[clock]) if repetitions else {}
        diloco, streaming = ([t / local_steps for t in taken.get(name, [])] for name in calls)
        ratio = paired_ratio(streaming, diloco) if taken else None
        rows.append(
            Row(sent, diloco, streaming, ratio, memory["diloco"], memory["streaming"], outer)
        )
    return rows


def _compile(run: Run, *, start: bool) -> tuple[tuple[int, int], Callable[[], Any]]:
    """Return a round's bytes and those of its outer state, and a function that runs one more."""
    shapes = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
    compiled = compile_round(run, shapes)
    found: Any = compiled.round.memory_analysis()
    total = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
    outer = compiled.state.params, compiled.state.outer_optimizer_state
    outer_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(outer))
    state = init_state(run, compiled, seed=0) if start else None
    cohort = jax.device_put(next(run.cohorts), run.resolved_shardings.cohort) if start else None

    def call() -> Any:
        nonlocal state
        state, metrics = compiled.round(state, cohort)
        return state, metrics

    return (total, outer_bytes), call


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="base_1m", help="name of a function of fedpax.models.presets"
    )
    parser.add_argument("--local_steps", type=int, default=100, help="local steps of a round, H")
    parser.add_argument("--batch_size", type=int, default=4, help="rows in a step of an island")
    parser.add_argument("--seq_len", type=int, default=64, help="tokens in a row")
    parser.add_argument("--delay", type=int, default=5, help="local steps under a transfer")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="timed rounds of each method; 0: compile only"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    rows = on_devices(
        ISLANDS,
        measure,
        options.model,
        options.local_steps,
        options.batch_size,
        options.seq_len,
        options.delay,
        options.repetitions,
        options.clock,
    )
    print("sent       DiLoCo ms a step   streaming    ratio   bytes a device       more")
    for row in rows:
        timed, ratio = ["-", "-"], "-"
        if row.ratio is not None:
            both = row.diloco_seconds, row.streaming_seconds
            timed = [f"{1e3 * statistics.median(seconds):.3f}" for seconds in both]
            ratio = f"{row.ratio:.3f}"
        more = row.streaming_bytes - row.diloco_bytes
        print(
            f"{row.sent:8} {timed[0]:>18} {timed[1]:>11} {ratio:>8} {row.diloco_bytes:16,} "
            f"{more:+10,}"
        )
    print(f"outer state: {rows[0].outer_state_bytes:,} bytes a device")
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
