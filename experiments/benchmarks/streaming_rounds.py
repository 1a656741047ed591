"""Local steps of Streaming DiLoCo against local steps of DiLoCo: time and memory.

    python -m fedpax.experiments.benchmarks.streaming_rounds --clock=cpu

Both train the same model with AdamW, on the same batches, with an island on each simulated device,
and send float32 or 4 bits. The time of a local step is the time of a round divided by its steps,
transfers included. The memory is what the compiler allocates on a device: state, batches and
temporaries.

Beside the state of DiLoCo, an island keeps its own model from one round to the next. In DiLoCo it
has one during a round. So Streaming DiLoCo may need at most as much more as the outer state has:
the outer model, and the momentum of the outer optimizer. On a busy machine, `--clock=cpu` measures
the CPU time of the process in place of wall-clock time.
"""

import dataclasses
from collections.abc import Callable
from statistics import median
from typing import Any

import jax

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, Timed, option
from fedpax.experiments.diloco_text import OuterConfig, diloco_text
from fedpax.experiments.streaming_diloco_text import StreamingConfig, streaming_diloco_text
from fedpax.experiments.text import TextExperiment
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.compiled_round import compile_round, init_state, with_shardings
from fedpax.training.experiment import Run

ISLANDS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Timed):
    """The options."""

    model: str = option("base_1m", "name of a function of fedpax.models.presets")
    local_steps: int = option(100, "local steps of a round, a multiple of layers + 1")
    batch_size: int = option(4, "rows in a step of an island")
    seq_len: int = option(64, "tokens in a row")
    delay: int = option(5, "local steps under a transfer")

    def experiments(self) -> dict[str, tuple[TextExperiment, TextExperiment]]:
        """Return DiLoCo's and Streaming DiLoCo's experiments by the format that they send."""
        config = getattr(presets, self.model)()
        sizes = {name: getattr(self, name) for name in ("local_steps", "batch_size", "seq_len")}

        def sized(base: Any, **settings: Any) -> TextExperiment:
            return dataclasses.replace(
                base,
                islands=ISLANDS,
                mesh=MeshConfig(islands=ISLANDS),
                model=config,
                data=dataclasses.replace(base.data, **sizes),
                **settings,
            )

        streaming = StreamingConfig(fragments=config.num_layers + 1, delay=self.delay)
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


def measure(settings: Settings) -> list[Row]:
    """Compile a round of each method, and time interleaved rounds, on two devices."""
    rows = []
    for sent, pair in settings.experiments().items():
        calls, memory, outer = {}, {}, 0
        for name, experiment in zip(("diloco", "streaming"), pair, strict=True):
            run = experiment.build()
            with jax.set_mesh(run.mesh):
                (memory[name], outer), calls[name] = _compile(run, start=settings.repetitions > 0)
        taken = timing.interleaved(calls, (), settings.repetitions, settings.clock)
        diloco, streaming = ([t / settings.local_steps for t in taken[name]] for name in calls)
        rows.append(
            Row(
                sent=sent,
                diloco_seconds=diloco,
                streaming_seconds=streaming,
                ratio=timing.paired_ratio(streaming, diloco),
                diloco_bytes=memory["diloco"],
                streaming_bytes=memory["streaming"],
                outer_state_bytes=outer,
            )
        )
    return rows


def _compile(run: Run, *, start: bool) -> tuple[tuple[int, int], Callable[[], Any]]:
    """Return the bytes of a round and of its outer state, and a function that runs one more."""
    shapes = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
    compiled = compile_round(run, shapes)
    memory: Any = compiled.round.memory_analysis()
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
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


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.3f}" if seconds else "-"


main = Benchmark(
    __doc__,
    Settings,
    lambda settings: timing.on_devices(ISLANDS, measure, settings),
    {
        "sent": "{sent:8}",
        "DiLoCo ms a step": lambda row: _milliseconds(row.diloco_seconds),
        "streaming": lambda row: _milliseconds(row.streaming_seconds),
        "ratio": "{ratio:.3f}",
        "bytes a device": "{diloco_bytes:,}",
        "more": lambda row: f"{row.streaming_bytes - row.diloco_bytes:+12,}",
    },
    lambda settings, rows: f"outer state: {rows[0].outer_state_bytes:,} bytes a device",
)


if __name__ == "__main__":
    raise SystemExit(main())
