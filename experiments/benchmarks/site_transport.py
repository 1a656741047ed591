"""Measure the transport between a syncer and its islands, on the loopback address.

    python -m fedpax.experiments.benchmarks.site_transport

A server in a process of its own receives messages of float32 arrays (push), or answers with them
(pull), over mutual TLS and without encryption. Each message is encoded, checked and decoded, as
between a syncer and its islands. With several islands, each has its connection and thread, all in
one process, and the rate is their sum.
"""

import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from fedpax.experiments.benchmarks import harness
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.sites.transport.calls import Connection, connect, serve
from fedpax.sites.transport.certificates import make_certificates
from fedpax.sites.transport.message import Message

MB = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options."""

    megabytes: list[float] = option("0.1,1,10,100", "sizes of the messages", harness.numbers)
    islands: list[int] = option("1,4", "numbers of connections", harness.integers)
    repeats: int = option(7, "timed calls per size and direction")


def measure(settings: Settings) -> Iterator[Row]:
    """Measure the rates without encryption and with mutual TLS."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "certificates"
        make_certificates(folder, ["localhost", "site"])
        for islands in settings.islands:
            for tls in (False, True):
                yield from _rates(settings, islands, tls, folder)


def _rates(settings: Settings, islands: int, tls: bool, folder: Path) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    certificates = folder / "site" if tls else None
    server = context.Process(
        target=_serve, args=(other_end, folder / "localhost" if tls else None), daemon=True
    )
    server.start()
    try:
        address = f"localhost:{pipe.recv()}"
        connections = [connect(address, certificates=certificates) for _ in range(islands)]
        for size in settings.megabytes:
            yield _rate(connections, tls, size, settings.repeats)
    finally:
        server.kill()
        server.join()


def _rate(connections: list[Connection], tls: bool, megabytes: float, repeats: int) -> Row:
    x = np.random.default_rng(0).normal(size=round(megabytes * MB / 4)).astype(np.float32)
    push = Message({"kind": "push"}, {"x": x})
    pull = Message({"kind": "pull", "size": x.size})

    def seconds(message: Message) -> tuple[float, float]:
        """Median and least seconds of a call per connection, where all call at once."""
        with ThreadPoolExecutor(len(connections)) as threads:
            times = []
            for _ in range(repeats + 1):  # the first connects
                begin = time.perf_counter()
                list(threads.map(lambda connection: connection.call(message, 600.0), connections))
                times.append(time.perf_counter() - begin)
            return statistics.median(times[1:]), min(times[1:])

    total = len(connections) * x.nbytes / MB
    (push_median, push_least), (pull_median, pull_least) = seconds(push), seconds(pull)
    return Row(
        tls=tls,
        islands=len(connections),
        megabytes=megabytes,
        push=total / push_median,
        pull=total / pull_median,
        best_push=total / push_least,
        best_pull=total / pull_least,
        empty_milliseconds=1000 * seconds(Message({"kind": "push"}))[0],
    )


def _serve(pipe: Pipe, certificates: Path | None) -> None:
    parameters: dict[int, np.ndarray] = {}

    def answer(peer: str, message: Message) -> Message:
        if message.header["kind"] == "push":
            return Message({})
        size = message.header["size"]
        if size not in parameters:
            parameters[size] = np.random.default_rng(1).normal(size=size).astype(np.float32)
        return Message({}, {"x": parameters[size]})

    with serve(answer, "localhost:0", certificates=certificates) as server:
        pipe.send(server.port)
        pipe.poll(None)  # until the other process closes its end


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "encryption": lambda row: "mutual TLS" if row.tls else "none      ",
        "islands": "{islands}",
        "message MB": "{megabytes:g}",
        "push MB/s: median (best)": "{push:.0f} ({best_push:.0f})",
        "pull": "{pull:5.0f} ({best_pull:5.0f})",
        "empty call ms": "{empty_milliseconds:.1f}",
    },
    aliases={"--json": "--out"},
)


if __name__ == "__main__":
    raise SystemExit(main())
