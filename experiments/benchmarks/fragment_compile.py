"""CPU time to trace, lower and compile rounds of Streaming DiLoCo by the number of fragments.

    python -m fedpax.experiments.benchmarks.fragment_compile

The model has a stacked layer for each fragment but the last. Equal fragments share the body of a
loop; `unrolled` is the time without loops. The bar is half of it with 16 fragments and more.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax

from fedpax.algorithms.parts import streaming_diloco_blocks
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, integers, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.streaming_diloco_text import StreamingConfig, streaming_diloco_text
from fedpax.models import presets
from fedpax.parallel.mesh import MeshConfig
from fedpax.training.compiled_round import run_state_shardings, with_shardings

ISLANDS, DELAY, MOST, BAR_FROM = 2, 1, 0.5, 16
STEPS = ("trace", "lower", "compile")


class FragmentCompile(Benchmark):
    fragments: list[int] = option("16", "numbers of fragments", integers)
    model: str = option("base_100k", "name of a function of fedpax.models.presets")
    compression: str = option("float32", "format of an outer gradient: float32 or e3m0")
    columns = (
        "fragments {fragments} | trace s {trace:.2f} | lower s {lower:.2f} "
        "| compile s {compile:.2f} | unrolled s {unrolled:.2f} | ratio {ratio:.2f}"
    )
    bar = f"{MOST:g} of the unrolled time from {BAR_FROM} fragments"

    def measure(self) -> Any:
        return timing.on_devices(ISLANDS, self.measure_here)

    def measure_here(self) -> Iterator[Row]:
        jax.config.update("jax_enable_compilation_cache", False)
        for fragments in self.fragments:
            looped = self.seconds(fragments, shortest_loop=streaming_diloco_blocks.SHORTEST_LOOP)
            unrolled = self.seconds(fragments, shortest_loop=fragments + 1)
            ratio = sum(looped) / sum(unrolled)
            yield Row(
                fragments=fragments,
                **dict(zip(STEPS, looped, strict=True)),
                unrolled=sum(unrolled),
                ratio=ratio,
                met=ratio <= MOST or fragments < BAR_FROM,
            )

    def seconds(self, fragments: int, *, shortest_loop: int) -> list[float]:
        """Return the CPU seconds to trace, lower and compile a round."""
        compression: Any = self.compression
        run = changed(
            streaming_diloco_text(),
            islands=ISLANDS,
            mesh=MeshConfig(islands=ISLANDS),
            model=changed(getattr(presets, self.model)(), num_layers=fragments - 1),
            data={"local_steps": 3 * fragments, "batch_size": 2, "seq_len": 32},
            streaming=StreamingConfig(fragments=fragments, delay=DELAY, compression=compression),
        ).build()
        with jax.set_mesh(run.mesh):
            cohort = with_shardings(run.cohort_shapes, run.resolved_shardings.cohort)
            params = jax.eval_shape(lambda: run.init(jax.random.key(0)))
            state: Any = jax.eval_shape(run.algorithm.init, params)
            state = with_shardings(state, run_state_shardings(run, params, state, ISLANDS))
            default, streaming_diloco_blocks.SHORTEST_LOOP = (
                streaming_diloco_blocks.SHORTEST_LOOP,
                shortest_loop,
            )
            times = [time.process_time()]
            try:
                traced = jax.jit(run.algorithm.round).trace(state, cohort)
            finally:
                streaming_diloco_blocks.SHORTEST_LOOP = default
            times.append(time.process_time())
            lowered = traced.lower()
            times.append(time.process_time())
            lowered.compile()
            times.append(time.process_time())
        return [b - a for a, b in itertools.pairwise(times)]


main = command(FragmentCompile)
