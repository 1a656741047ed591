"""Measure the part of a checkpoint's time that training waits for.

    python -m fedpax.experiments.benchmarks.saving --megabytes=512

saves a state of random arrays as a run does, and prints for each save the seconds until `save`
returns, when training continues, and the seconds until the checkpoint is complete with its
checksums. The last line is the median share of the first in the second.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option

NUM_ARRAYS = 48


class Saving(Benchmark):
    megabytes: int = option(512, "size of the state")
    saves: int = option(5, "number of saves")
    folder: str | None = option(None, "where to save; default: a temporary folder")
    columns = "training waits, s {blocked:.3f} | complete after, s {complete:.3f}"

    def measure(self) -> Iterator[Row]:
        """Save a state several times, each time after a step that donates it."""
        shape = (self.megabytes * 10**6 // (4 * NUM_ARRAYS),)
        keys = jax.random.split(jax.random.key(0), NUM_ARRAYS)
        state = [jax.random.normal(key, shape) for key in keys]
        step = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.float32(1), s), donate_argnums=0)
        print(f"{self.megabytes} MB in {NUM_ARRAYS} arrays on {jax.devices()[0].device_kind}")
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            Checkpoints(Path(folder), keep=1) as checkpoints,
        ):
            for number in range(self.saves + 1):
                state = jax.block_until_ready(step(state))
                started = time.perf_counter()
                checkpoints.save(number, state, {"round": number}, {})
                blocked = time.perf_counter() - started
                checkpoints.wait()
                if number:
                    yield Row(blocked=blocked, complete=time.perf_counter() - started)

    def summary(self, rows: list[Row]) -> str:
        share = statistics.median(row.blocked / row.complete for row in rows)
        return f"share that training waits: {share:.3f}"


main = command(Saving)
