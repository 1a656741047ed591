"""Measure the part of a checkpoint's time that training waits for.

    python -m fedpax.experiments.benchmarks.saving --megabytes=512

saves a state of random arrays as a run does, and prints for each save the seconds until `save`
returns, when training continues, and the seconds until the checkpoint is complete with its
checksums. The last line is the median share of the first in the second.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedpax.checkpoints.checkpoint import Checkpoints

ARRAYS = 16


class State(NamedTuple):
    """A model and two moments of its parameters, as AdamW has them."""

    params: list[jax.Array]
    first_moment: list[jax.Array]
    second_moment: list[jax.Array]


class Times(NamedTuple):
    """The times of one save.

    Attributes:
        blocked: seconds until `save` returned.
        complete: seconds until the checkpoint was complete.
    """

    blocked: float
    complete: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark.

    Args:
        arguments: the command line. Default None: that of the process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state")
    parser.add_argument("--saves", type=int, default=5, help="number of saves")
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    options = parser.parse_args(arguments)
    size = options.megabytes * 10**6 // (4 * ARRAYS * len(State._fields))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        times = measure(random_state(size), Path(folder), options.saves)
    device = jax.devices()[0].device_kind
    print(f"{options.megabytes} MB in {ARRAYS * len(State._fields)} arrays on {device}")
    for blocked, complete in times:
        print(f"training waits {blocked:.3f} s, complete after {complete:.3f} s")
    print(f"share that training waits: {statistics.median(t[0] / t[1] for t in times):.3f}")


def random_state(size: int) -> State:
    """Return a state of random arrays.

    Args:
        size: numbers in each array.
    """

    def draw(field: int) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(field), ARRAYS)
        return [jax.random.normal(key, (size,)) for key in keys]

    return State(*map(draw, range(len(State._fields))))


def measure(state: State, folder: Path, num_saves: int) -> list[Times]:
    """Save a state several times, each time after a step that donates it.

    Args:
        state: the state; its buffers are donated.
        folder: a folder for the checkpoints.
        num_saves: number of saves that are measured. One more warms up.

    Returns:
        The times of each save.
    """
    step = jax.jit(
        lambda state: jax.tree.map(lambda x: x + jnp.float32(1), state), donate_argnums=0
    )
    times = []
    with Checkpoints(folder, keep=1) as checkpoints:
        for number in range(num_saves + 1):
            state = jax.block_until_ready(step(state))
            started = time.perf_counter()
            checkpoints.save(number, state, {"round": number}, {})
            blocked = time.perf_counter() - started
            checkpoints.wait()
            times.append(Times(blocked, time.perf_counter() - started))
    return times[1:]


if __name__ == "__main__":
    main()
