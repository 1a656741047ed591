"""Local steps of Streaming DiLoCo against local steps of DiLoCo: time and memory.

    python -m fedpax.experiments.benchmarks.streaming_rounds --clock=cpu

Both train the same model with AdamW, on the same batches, with an island on each simulated device.
The time of a local step includes transfers. The memory is what the compiler allocates on a device:
Streaming DiLoCo may need more by the size of the outer model and momentum.
"""

from collections.abc import Iterator
from typing import Any

import jax

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.diloco_text import OuterConfig, diloco_text
from fedpax.experiments.streaming_diloco_text import StreamingConfig, streaming_diloco_text
from fedpax.experiments.text_experiment import TextExperiment
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.compiled_round import compile_round, init_state, with_shardings
from fedpax.training.prefetch import put_on_mesh

ISLANDS = 2


class StreamingRounds(Timed):
    model: str = option("base_1m", "name of a function of fedpax.models.presets")
    local_steps: int = option(100, "local steps of a round, a multiple of layers + 1")
    batch_size: int = option(4, "rows in a step of an island")
    seq_len: int = option(64, "tokens in a row")
    delay: int = option(5, "local steps under a transfer")
    columns = (
        "sent {sent:8} | DiLoCo ms a step {diloco_milliseconds:.3f} "
        "| streaming {streaming_milliseconds:.3f} | ratio {ratio:.3f} "
        "| bytes a device {diloco_bytes:,} | more {more_bytes:+12,}"
    )

    def experiments(self) -> dict[str, tuple[TextExperiment, TextExperiment]]:
        """Return DiLoCo's and Streaming DiLoCo's experiments by the format that they send."""
        config = getattr(presets, self.model)()
        sizes = {name: getattr(self, name) for name in ("local_steps", "batch_size", "seq_len")}

        def sized(base: Any, **settings: Any) -> TextExperiment:
            mesh, model = MeshConfig(islands=ISLANDS), {"model": config, "data": sizes}
            made: TextExperiment = changed(base, islands=ISLANDS, mesh=mesh, **model, **settings)
            return made

        def pair(num_levels: int | None, **sent: Any) -> tuple[TextExperiment, TextExperiment]:
            fragments = config.num_layers + 1
            streaming = StreamingConfig(fragments=fragments, delay=self.delay, **sent)
            diloco = sized(diloco_text(), outer=OuterConfig(num_levels=num_levels))
            return diloco, sized(streaming_diloco_text(), streaming=streaming)

        return {"float32": pair(None, compression="float32"), "4 bits": pair(16)}

    def measure(self) -> Any:
        return timing.on_devices(ISLANDS, self.measure_here)

    def measure_here(self) -> Iterator[Row]:
        for sent, pair in self.experiments().items():
            calls, memory, outer = {}, {}, 0
            for name, experiment in zip(("diloco", "streaming"), pair, strict=True):
                run = experiment.build()
                sharding = run.resolved_shardings.cohort
                with jax.set_mesh(run.mesh):
                    compiled = compile_round(run, with_shardings(run.cohort_shapes, sharding))
                    if self.repetitions:
                        state = init_state(run, compiled.state, seed=0)
                        cohort = put_on_mesh(next(run.cohorts), sharding)
                        calls[name] = timing.repeated(compiled.round, state, cohort)
                used: Any = compiled.round.memory_analysis()
                kept = used.output_size_in_bytes - used.alias_size_in_bytes
                memory[name] = used.argument_size_in_bytes + kept + used.temp_size_in_bytes
                leaves = jax.tree.leaves(
                    (compiled.state.params, compiled.state.outer_optimizer_state)
                )
                outer = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            seconds = {name: list[float]() for name in memory} | self.time(calls)
            yield Row(
                sent=sent,
                ratio=timing.paired_ratio(seconds["streaming"], seconds["diloco"]),
                outer_state_bytes=outer,
                more_bytes=memory["streaming"] - memory["diloco"],
                **{f"{name}_bytes": size for name, size in memory.items()},
                **{
                    f"{name}_milliseconds": [1e3 * s / self.local_steps for s in taken]
                    for name, taken in seconds.items()
                },
            )

    def summary(self, rows: list[Row]) -> str:
        return f"outer state: {rows[0].outer_state_bytes:,} bytes a device"


main = command(StreamingRounds)
