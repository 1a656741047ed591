"""Input of rounds of clients: CPU time to lay out a cohort, and the waiting of a fast device.

    python -m fedpax.experiments.benchmarks.cohort_input --clients=1000 --faster=50 --clock=cpu

A cohort has images of 28 x 28 pixels from clients of log-normal sizes, 28 images in the median, in
batches of 10. Laying out takes at most 2.5 times as long as copying the arrays to used memory. The
waiting, at most 10%, is measured while a thread lays out the next cohort and the CPU is idle for as
long as a device `faster` times as fast would train an MLP. `uint8 to float32` are scaled by the
host in the time of a cohort, by the device, not counted, in the waiting.

On a shared machine, `--clock=cpu` computes the waiting: the CPU time of the thread that lays out a
cohort, less a round's CPU time divided by `faster`, with a free core for the thread that gathers
half of a large array. `CPU s of a cohort` counts both.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import fedpax
from fedpax.clients.cohort import PackedStream
from fedpax.data import ClientSampler, CohortRounds, cohort_rounds
from fedpax.data.rounds.labeled_examples import preprocess_images
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Row, Timed, command, option
from fedpax.experiments.benchmarks.workloads import WORKLOADS
from fedpax.training.prefetch import Prefetch

MOST_COPIES, MOST_WAITING = 2.5, 0.1
MEMORIES = 3  # for the cohort of the device, the one that waits, and the one that is laid out
KINDS = "float32", "uint8", "uint8 to float32"


class CohortInput(Timed):
    clients: int = option(1000, "clients of a cohort, of 4 times as many")
    faster: float = option(50.0, "speed of the device, as a multiple of this CPU's")
    examples: int = option(60_000, "images of all clients")
    columns = (
        "images {kind:16} | MB {megabytes:.0f} | CPU s of a cohort {seconds:.4f} "
        "| in copies {copies:.2f} | s on the device {computing:.4f} | waiting {waiting:.1%}"
    )
    bar = f"{MOST_COPIES:g} copies, {MOST_WAITING:.0%} waiting"

    def measure(self) -> Iterator[Row]:
        computing = None
        for fields, stream in streams(self):
            cohort = next(stream)
            if computing is None:
                computing = round_seconds(cohort, self.clock) / self.faster
            copies = jax.tree.map(np.copy, cohort.batches)
            calls = {
                "next": lambda stream=stream: next(stream).batches,
                "copy": lambda pair=(copies, cohort.batches): jax.tree.map(np.copyto, *pair),
            }
            seconds = timing.interleaved(calls, (), self.repetitions, "cpu")
            ratio = timing.paired_ratio(seconds["next"], seconds["copy"])
            fraction = waiting(stream, computing, self.repetitions, self.clock)
            yield Row(
                kind=fields,
                megabytes=sum(v.nbytes for v in cohort.batches.values()) / 1e6,
                seconds=seconds["next"],
                copies=ratio,
                computing=computing,
                waiting=fraction,
                met=ratio is not None and ratio <= MOST_COPIES and fraction <= MOST_WAITING,
            )


def streams(sizes: CohortInput) -> Iterator[tuple[str, CohortRounds]]:
    """Make the stream of each kind of images."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (sizes.examples, 28, 28, 1), np.uint8)
    labels = random.integers(0, 10, sizes.examples, np.int32)
    counts = np.ceil(random.lognormal(np.log(28), 0.9, 4 * sizes.clients)).clip(1, 100)
    clients = [random.integers(0, sizes.examples, int(count)) for count in counts]
    sampler = ClientSampler(len(clients), sizes.clients)
    floats = {"image": images / np.float32(255), "label": labels}
    integers = {"image": images, "label": labels}
    for kind, arrays in zip(KINDS, (floats, integers, integers), strict=True):
        preprocess = preprocess_images if kind == KINDS[2] else dict
        yield kind, cohort_rounds(arrays, clients, sampler, batch_size=10, preprocess=preprocess)


def round_seconds(cohort: fedpax.Cohort, clock: str = "wall") -> float:
    """Return the seconds of a FedAvg round of an MLP on this CPU."""
    workload = WORKLOADS["mlp"]()
    algorithm = workload.fedavg(cohort.batches["label"].shape[0], chunk_size=1)
    image = cohort.batches["image"].reshape(*cohort.batches["mask"].shape, -1)
    cohort = cohort._replace(batches={**cohort.batches, "image": image.astype(np.float32)})
    state = algorithm.init(jax.jit(workload.model.init)(jax.random.key(0)))
    calls = {"round": jax.jit(algorithm.round)}
    return min(timing.interleaved(calls, (state, cohort), 2, clock)["round"])


class TimedStream:
    """A stream, and the CPU seconds of its thread for each cohort."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.get_state, self.set_state = stream.get_state, stream.set_state
        self.cpu_seconds: list[float] = []
        if isinstance(stream, PackedStream):  # the devices scale its images
            self.unpack = stream.unpack
            self.next_packed = lambda: self._timed(stream.next_packed)

    def __next__(self) -> fedpax.Cohort:
        return self._timed(self._stream.__next__)

    def _timed(self, draw: Callable[[], fedpax.Cohort]) -> fedpax.Cohort:
        began = time.thread_time()
        cohort = draw()
        self.cpu_seconds.append(time.thread_time() - began)
        return cohort


def waiting(stream: Any, computing: float, rounds: int, clock: str = "wall") -> float:
    """Return the fraction of time in which a loop waits for the next cohort."""
    mesh = jax.make_mesh((1,), ("clients",), devices=jax.devices()[:1])
    device = NamedSharding(mesh, PartitionSpec())
    timed, waited = TimedStream(stream), []
    with Prefetch(timed, device, rounds + MEMORIES) as cohorts:
        for _ in range(MEMORIES):
            cohorts.next()
        for _ in range(rounds):
            time.sleep(computing)
            asked = time.perf_counter()
            jax.block_until_ready(cohorts.next())
            waited.append(time.perf_counter() - asked)
    seconds = statistics.median(waited)
    if clock == "cpu":
        seconds = max(0.0, statistics.median(timed.cpu_seconds[MEMORIES:]) - computing)
    return seconds / (seconds + computing)


main = command(CohortInput)
