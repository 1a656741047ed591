"""Measure the part of a checkpoint's time that training waits for, and what it writes.

    python -m fedpax.experiments.benchmarks.saving --megabytes=512

saves a state of random arrays, and prints for each save the seconds until training continues and
until the checkpoint is complete, and the median ratio of the two.

    python -m fedpax.experiments.benchmarks.saving --clients=100000 --floats=2368

saves random states of clients: all in the first checkpoint, then those that changed in `--rounds`
rounds of `--cohort` clients each. `CPU s` are those of `save` and of the writers. The last row
restores the newest checkpoint and compares the states. `most MB` is the process's largest memory
until then.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.checkpoints.checkpoint import Checkpoints
from fedpax.clients import ClientStore
from fedpax.clients.row_blocks import count_rows, row_blocks, row_fingerprints
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option

NUM_ARRAYS = 48


class State(NamedTuple):
    params: jax.Array
    store: ClientStore[jax.Array]


class Saving(Benchmark):
    megabytes: int = option(512, "size of the state")
    saves: int = option(5, "number of saves")
    clients: int = option(0, "save the states of so many clients; 0: save arrays")
    floats: int = option(2368, "numbers in the state of a client")
    cohort: int = option(100, "clients that change their states in a round")
    rounds: int = option(10, "rounds between checkpoints")
    folder: str | None = option(None, "where to save; default: a temporary folder")
    columns = (
        "what {what} | MB written {megabytes:,.1f} | training waits, s {blocked:.3f} | "
        "complete after, s {complete:.3f} | CPU s {cpu:.2f} | most MB {memory:,.0f}"
    )

    def measure(self) -> Iterator[Row]:
        """Save a state several times, each time after a step that donates it."""
        state, step = self._clients() if self.clients else self._arrays()
        with timing.new_folder(self.folder) as folder:
            with Checkpoints(folder, keep=1) as checkpoints:
                for number in range(self.saves + 1):
                    state = jax.block_until_ready(step(state, number))
                    started, cpu = time.perf_counter(), time.process_time()
                    checkpoints.save(number, state, {"round": number}, {})
                    blocked = time.perf_counter() - started
                    checkpoints.wait()
                    if number or self.clients:
                        size = _size(folder / "checkpoints" / str(number)) / 1e6
                        yield _row(f"save {number}", size, blocked, started, cpu)
            if self.clients:
                like = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
                )
                prints = _fingerprints(state)
                del state  # the memory for another store
                yield _restore(folder, like, prints)

    def _arrays(self) -> tuple[Any, Callable[[Any, int], Any]]:
        shape = (self.megabytes * 10**6 // (4 * NUM_ARRAYS),)
        keys = jax.random.split(jax.random.key(0), NUM_ARRAYS)
        state = [jax.random.normal(key, shape) for key in keys]
        step = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.float32(1), s), donate_argnums=0)
        print(f"{self.megabytes} MB in {NUM_ARRAYS} arrays on {jax.devices()[0].device_kind}")
        return state, lambda state, number: step(state)

    def _clients(self) -> tuple[State, Callable[[State, int], State]]:
        keys = jax.random.split(jax.random.key(0), count_rows(self.clients, 1) // 8)

        def eight_rows(key: jax.Array) -> jax.Array:  # at once, they would need three times as much
            return jax.random.normal(key, (8, self.floats))

        random = jax.jit(lambda: jax.lax.map(eight_rows, keys).reshape(-1, self.floats))()
        state = State(jnp.zeros(self.floats), ClientStore(random, self.clients))
        print(f"{self.clients:,} clients of {self.floats:,} floats, {random.nbytes / 1e6:,.0f} MB")

        def step(state: State, client_ids: jax.Array) -> State:
            rows = state.store.rows.at[client_ids].add(1)
            return State(state.params + 1, ClientStore(rows, self.clients))

        jitted = jax.jit(step, donate_argnums=0)
        rng = np.random.default_rng(0)

        def rounds(state: State, number: int) -> State:
            for _ in range(self.rounds if number else 0):
                state = jitted(state, rng.choice(self.clients, self.cohort, replace=False))
            return state

        return state, rounds

    def summary(self, rows: list[Row]) -> str:
        share = statistics.median(row.blocked / row.complete for row in rows)
        return f"share that training waits: {share:.3f}"


def _size(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _row(what: str, megabytes: float | None, blocked: float, started: float, cpu: float) -> Row:
    """Make the row of a job that began at these seconds of the clock and of the CPU."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts KiB
    times = {"complete": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    return Row(what=what, megabytes=megabytes, blocked=blocked, memory=memory, **times)


def _fingerprints(state: State) -> np.ndarray:
    leaves = jax.tree.leaves(state.store)
    blocks = row_blocks(leaves)
    assert blocks is not None
    return row_fingerprints(leaves, blocks)


def _restore(folder: Path, like: State, prints: np.ndarray) -> Row:
    started, cpu = time.perf_counter(), time.process_time()
    with Checkpoints(folder, keep=1) as checkpoints:
        restored = jax.block_until_ready(checkpoints.restore_state(like))
    row = _row("restore", None, time.perf_counter() - started, started, cpu)
    assert (_fingerprints(restored) == prints).all()
    return row


main = command(Saving)
