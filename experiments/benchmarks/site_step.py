"""Measure an island's step beside the syncer, relative to a step alone.

    python -m fedpax.experiments.benchmarks.site_step

One island trains the demo's model, and exchanges a fragment with a syncer after every S steps, over
mutual TLS. The syncer merges and saves each update at once. Blocks of steps with and without the
exchange alternate in one process, without reading data. The island and the syncer have a core each,
if there are two; copies and transfers take time from the island's.
"""

import contextlib
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.experiments.benchmarks.workloads import changed
from fedpax.experiments.decoupled_diloco_text import DecoupledDiLoCoText, decoupled_diloco_text
from fedpax.islands.island.island import Island
from fedpax.islands.island.link import Link
from fedpax.islands.island.local_model import LocalModel
from fedpax.islands.method_parts import build_parts, parts_of
from fedpax.islands.syncer.outer_model import OuterModel
from fedpax.islands.syncer.syncer import Syncer
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.parallel.mesh import SINGLE_DEVICE
from fedpax.sites.site_process import identify
from fedpax.transport.calls import connect, serve
from fedpax.transport.certificates import make_certificates

SETTLE_SECONDS = 0.5


class SiteStep(Benchmark):
    local_steps: int = option(32, "inner steps of a round, H; a fragment is sent every H / P")
    batch_size: int = option(16, "rows of a step")
    seq_len: int = option(64, "tokens of a row")
    phases: int = option(8, "phases of a block")
    pairs: int = option(9, "pairs of blocks")
    columns = (
        "a step alone, ms {alone_milliseconds:.2f} | beside the syncer, ms "
        "{beside_milliseconds:.2f} | ratio {ratio:.3f} "
        "| merges per phase {merges_per_phase:.2f} | MB per phase {megabytes_per_phase:.2f}"
    )

    def measure(self) -> list[Row]:
        context = multiprocessing.get_context("spawn")
        with timing.new_folder() as folder:
            make_certificates(folder / "certificates", ["localhost", "site"])
            with (
                timing.in_process(self._serve, folder) as pipe,
                ProcessPoolExecutor(1, context) as island,
            ):
                return [island.submit(self._train, pipe.recv(), folder).result()]

    def _experiment(self) -> DecoupledDiLoCoText:
        sizes = {name: getattr(self, name) for name in ("local_steps", "batch_size", "seq_len")}
        fields: dict[str, Any] = {"islands": 1, "data": sizes, "decoupled": {"quorum": 1}}
        made: DecoupledDiLoCoText = changed(decoupled_diloco_text(), mesh=SINGLE_DEVICE, **fields)
        return made

    def _serve(self, pipe: Pipe, folder: Path) -> None:
        _use_core(1)
        experiment = self._experiment()
        run = build_parts(experiment, SINGLE_DEVICE)
        parts, params = parts_of(run), jax.device_get(jax.jit(run.init)(jax.random.key(0)))
        syncer = Syncer(
            parts,
            OuterModel(parts, params),
            identify(experiment, params),
            num_merges=10**9,
            store=SyncerStore(folder),
        )
        certificates = folder / "certificates" / "localhost"
        with serve(syncer.handle, "localhost:0", certificates=certificates) as server:
            pipe.send(f"localhost:{server.port}")
            pipe.poll(None)  # until the other process closes its end

    def _train(self, address: str, folder: Path) -> Row:
        _use_core(0)
        experiment = self._experiment()
        run = build_parts(experiment, SINGLE_DEVICE)
        parts, types = parts_of(run), jax.eval_shape(run.init, jax.random.key(0))
        member: dict[str, Any] = {"island": "site", "incarnation": "1", "folder": "1", "run": None}
        member |= {"shard": 0, "identity": identify(experiment, types)._asdict()}
        with (
            jax.set_mesh(run.mesh),
            connect(address, certificates=folder / "certificates" / "site") as connection,
        ):
            model = LocalModel(run)
            link = Link(connection.call, member, model.formats, [-1] * len(model.formats))
            link.join()
            link.start()
            tokens = float(self.seq_len)
            island = Island(parts, model, link, shard=0, process="1", tokens_per_step=tokens)
            while not island.has_model:
                link.wait(0.1)
                island.receive()
            batches = jax.device_put(_random_batches(run, parts.steps_per_sync))
            try:
                return self._blocks(island, link, model, batches, parts.steps_per_sync)
            finally:
                link.close()

    def _blocks(
        self, island: Island, link: Link, model: LocalModel, batches: Any, steps: int
    ) -> Row:
        """Time blocks of phases of some steps with the exchange and without it."""

        def beside() -> None:
            for _ in range(self.phases):
                while island.is_ahead:
                    link.wait(0.05)
                    island.receive()
                    island.send()
                island.train(batches)

        def alone() -> None:
            last = None
            for _ in range(self.phases):
                island.state, report = model.take_steps(island.state, batches, 0)
                if last is not None:
                    float(last.metrics["loss"])  # as an island reads it, one phase later
                last = report

        seconds: dict[Any, list[float]] = {alone: [], beside: []}
        merges = megabytes = 0.0
        for pair in range(self.pairs + 1):  # the first pair compiles
            for block in (alone, beside) if pair % 2 else (beside, alone):
                before = link.merges, link.sent_bytes + link.received_bytes
                jax.block_until_ready(island.state)
                began = time.perf_counter()
                block()
                jax.block_until_ready(island.state)
                taken = time.perf_counter() - began
                island.finish(60.0)
                time.sleep(SETTLE_SECONDS)
                island.receive()
                if pair:
                    seconds[block].append(taken)
                    merges += link.merges - before[0]
                    megabytes += (link.sent_bytes + link.received_bytes - before[1]) / 1e6
        phases = self.phases * self.pairs
        times = {
            block: [1000 * s / steps / self.phases for s in seconds[block]] for block in seconds
        }
        return Row(
            alone_milliseconds=times[alone],
            beside_milliseconds=times[beside],
            ratio=timing.paired_ratio(times[beside], times[alone]),
            merges_per_phase=merges / phases,
            megabytes_per_phase=megabytes / phases,
        )


def _random_batches(run: Any, steps: int) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda like: rng.integers(1, 100, (steps, *like.shape[2:])).astype(like.dtype),
        run.cohort_shapes.batches,
    )


def _use_core(core: int) -> None:
    """Run this process on one core, if the operating system can do so and has two or more."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cores[core]})


main = command(SiteStep)
