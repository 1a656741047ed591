"""Tests of the benchmarks of sites: what failures cost, and the rate of the transport."""

import contextlib
import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from fedpax import Cohort
from fedpax.commands.flag_table import FLAGS
from fedpax.experiments.benchmarks import site_step, site_transport
from fedpax.experiments.benchmarks.chaos import (
    Chaos,
    PacedStream,
    PacedText,
    draw_outcomes,
    restarted_data_parallelism,
)
from fedpax.experiments.benchmarks.chaos_sites import (
    SYNCER,
    Failure,
    Outcome,
    Restart,
    draw_failures,
)
from fedpax.experiments.benchmarks.unreliable_network import UnreliableNetwork


@pytest.mark.parametrize("seed", range(5))
def test_restarted_data_parallelism_equals_a_simulation_in_small_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds, restart, checkpoint = 100.0, rng.uniform(1, 10), rng.uniform(1, 10)
    failures = draw_failures(seed, 4, 150.0, mean_seconds=9.0)
    # Thousandths of a second, one after another.
    kept, unsaved, down_until, step = 0.0, 0.0, 0.0, 1e-3
    events = [f for f in failures if f.kind != "throttle"]
    for now in np.arange(0.0, seconds, step):
        while events and events[0].time <= now:
            failure = events.pop(0)
            down_until = max(down_until, failure.time + failure.seconds + restart)
            unsaved = 0.0
        if now >= down_until:
            unsaved += step
            if unsaved >= checkpoint:
                kept, unsaved = kept + checkpoint, unsaved - checkpoint
    want = (kept + unsaved) / seconds
    got = restarted_data_parallelism(failures, seconds, restart, checkpoint)
    assert got == pytest.approx(want, abs=2e-3)
    assert restarted_data_parallelism([], seconds, restart, checkpoint) == 1.0
    failures = [Failure(25.0, "kill", 0, 1.0), Failure(30.0, "cut", 1, 2.0)]
    assert restarted_data_parallelism(failures, 100.0, 8.0, checkpoint_seconds=10.0) == 0.8


def outcome(seed: int, rate: float, failing: bool) -> Outcome:
    rng = np.random.default_rng(seed)
    failures = draw_failures(seed, 4, 90.0, mean_seconds=6.0) if failing else []
    kills = [f for f in failures if f.kind in ("kill", "kill syncer")]
    restarts = [Restart(f.island, f.time, float(rng.uniform(2, 9))) for f in kills]
    merges = [(float(t), rate) for t in np.sort(rng.uniform(0, 100, 50))]
    return Outcome(100.0, merges, 0, {0: 1, 2: 2}, {0: 7}, restarts, [0] * 5, failures, 0.1)


def test_a_run_with_failures_is_compared_with_an_undisturbed_one(tmp_path: Path) -> None:
    quiet, chaotic = outcome(1, 16.0, failing=False), outcome(2, 12.0, failing=True)
    row = Chaos(round_seconds=1.5, mean_seconds=6.0).compare((quiet, chaotic), (2.5, 2.6))
    assert row.useful == pytest.approx(0.75)
    restarts = [r.seconds for r in chaotic.restarts if r.process != SYNCER]
    assert row.restart_seconds == pytest.approx(np.median(restarts))
    assert row.data_parallel == restarted_data_parallelism(
        chaotic.failures, 100.0, row.restart_seconds, 3.0
    )
    assert sum(row.failures.values()) == len(chaotic.failures)
    assert (row.quiet_loss, row.loss, row.lost_updates, row.late) == (2.5, 2.6, 3, 0.1)
    draw_outcomes(quiet, chaotic).savefig(tmp_path / "chaos.png")
    assert (tmp_path / "chaos.png").read_bytes().startswith(b"\x89PNG")


def test_a_network_that_is_cut_while_an_island_connects_accepts_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = socket.create_connection
    with socket.create_server(("127.0.0.1", 0)) as server:
        with UnreliableNetwork(server.getsockname()[1]) as network:

            def connect_to_server(*arguments: Any) -> socket.socket:
                network.cut()
                return connect(*arguments)

            monkeypatch.setattr(socket, "create_connection", connect_to_server)
            with connect(("127.0.0.1", network.port), 10) as client:
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            monkeypatch.undo()
            network.restore()
            with connect(("127.0.0.1", network.port), 10) as client:
                client.sendall(b"x")
                assert _receive(server) == b"x"


def _receive(server: socket.socket) -> bytes:
    """Return the first byte of the connections that are waiting."""
    while True:
        connection, _ = server.accept()
        with connection:
            if received := connection.recv(1):
                return received


def test_no_flag_of_a_command_hides_a_field_of_the_experiment() -> None:
    assert not {field.name for field in dataclasses.fields(PacedText)} & set(FLAGS)


def test_a_paced_stream_keeps_its_rate_and_position() -> None:
    class Numbers:
        place = 0

        def __next__(self) -> Cohort:
            self.place += 1
            return Cohort(np.array(self.place))

        def get_state(self) -> dict[str, int]:
            return {"place": self.place}

        def set_state(self, state: dict[str, int]) -> None:
            self.place = state["place"]

    stream = PacedStream(Numbers(), seconds=0.05)
    stream.set_state({"place": 6})
    begin = time.monotonic()
    assert [int(next(stream).batches) for _ in range(4)] == [7, 8, 9, 10]
    assert time.monotonic() - begin >= 0.15  # the first one comes at once
    assert stream.get_state() == {"place": 10}


@pytest.mark.slow
def test_steps_beside_the_syncer_are_measured(tmp_path: Path) -> None:
    sizes = ["--local_steps=4", "--batch_size=1", "--seq_len=8", "--phases=3", "--pairs=2"]
    out = tmp_path / "steps.json"
    (result,) = site_step.main.run([*sizes, f"--out={out}"])
    assert 0 < min(result.alone_milliseconds) and 0 < result.ratio < 100 and out.exists()
    # The island sends an update per phase, and receives the fragment after each merge.
    assert 0.5 <= result.merges_per_phase <= 1.5 and result.megabytes_per_phase > 0.1


@pytest.mark.slow
def test_the_rate_of_the_transport_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "rates.json"
    arguments = ["--megabytes=0.5", "--islands=2", "--repeats=2", f"--out={out}"]
    rates = site_transport.main.run(arguments)
    assert [rate.tls for rate in rates] == [False, True]
    assert all(
        0 < rate.push <= rate.best_push and 0 < rate.pull <= rate.best_pull for rate in rates
    )
    assert out.exists()
