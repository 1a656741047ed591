"""Measure the transport between a syncer and its islands, on the loopback address.

    python -m fedpax.experiments.benchmarks.site_transport

A server in its own process receives messages of float32 arrays (push), or answers with them (pull),
over mutual TLS and without encryption. Each message is encoded, checked and decoded. The rate is
the sum over islands, each with a connection and a thread in one process.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.transport.calls import Connection, connect, serve
from fedpax.transport.certificates import make_certificates
from fedpax.transport.message import Message

MB = 1_000_000


class SiteTransport(Benchmark):
    megabytes: list[float] = option("0.1,1,10,100", "sizes of the messages", harness.numbers)
    islands: list[int] = option("1,4", "numbers of connections", harness.integers)
    repeats: int = option(7, "timed calls per size and direction")
    columns = (
        "encryption {encryption:10} | islands {islands} | message MB {megabytes:g} "
        "| push MB/s: median (best) {push:.0f} ({best_push:.0f}) "
        "| pull {pull:5.0f} ({best_pull:5.0f}) | empty call ms {empty_milliseconds:.1f}"
    )

    def measure(self) -> Iterator[Row]:
        with timing.new_folder() as temporary:
            folder = temporary / "certificates"
            make_certificates(folder, ["localhost", "site"])
            for islands, tls in itertools.product(self.islands, (False, True)):
                certificates = folder / "site" if tls else None
                with timing.in_process(_serve, folder / "localhost" if tls else None) as pipe:
                    address = f"localhost:{pipe.recv()}"
                    links = [connect(address, certificates=certificates) for _ in range(islands)]
                    for size in self.megabytes:
                        yield _rate(links, tls, size, self.repeats)


def _rate(connections: list[Connection], tls: bool, megabytes: float, repeats: int) -> Row:
    x = np.random.default_rng(0).normal(size=round(megabytes * MB / 4)).astype(np.float32)
    total = len(connections) * x.nbytes / MB

    def seconds(message: Message) -> tuple[float, float]:
        """Median and least seconds of a call per connection, where all call at once."""
        with ThreadPoolExecutor(len(connections)) as threads:
            times = []
            for _ in range(repeats + 1):  # the first connects
                begin = time.perf_counter()
                list(threads.map(lambda connection: connection.call(message, 600.0), connections))
                times.append(time.perf_counter() - begin)
            return statistics.median(times[1:]), min(times[1:])

    rates: dict[str, float] = {}
    messages = Message({"kind": "push"}, {"x": x}), Message({"kind": "pull", "size": x.size})
    for message in messages:
        kind, (median, least) = message.header["kind"], seconds(message)
        rates |= {kind: total / median, f"best_{kind}": total / least}
    return Row(
        tls=tls,
        encryption="mutual TLS" if tls else "none",
        islands=len(connections),
        megabytes=megabytes,
        empty_milliseconds=1000 * seconds(Message({"kind": "push"}))[0],
        **rates,
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


main = command(SiteTransport)
