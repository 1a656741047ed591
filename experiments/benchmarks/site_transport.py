"""Measure the transport between a syncer and its islands, on the loopback address.

    python -m fedpax.experiments.benchmarks.site_transport

A server in a process of its own receives messages of float32 arrays (push), or answers with them
(pull), over mutual TLS and without encryption. Each message is encoded, checked and decoded, as
between a syncer and its islands. With several islands, each has its connection and thread, all in
one process, and the rate is that of all together.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpax.experiments.benchmarks.arguments import integers, numbers
from fedpax.experiments.benchmarks.timing import write
from fedpax.sites.certificates import make_certificates
from fedpax.sites.message import Message
from fedpax.sites.transport import Connection, connect, serve

MB = 1_000_000


class Rate(NamedTuple):
    """The rate of messages of one size.

    Attributes:
        tls: whether the connections use mutual TLS.
        islands: number of connections that send or receive at the same time.
        megabytes: size of a message.
        push: MB/s to the server, median.
        pull: MB/s from the server, median.
        best_push: MB/s to the server, fastest call.
        best_pull: MB/s from the server, fastest call.
        empty_milliseconds: milliseconds of a call without arrays, median.
    """

    tls: bool
    islands: int
    megabytes: float
    push: float
    pull: float
    best_push: float
    best_pull: float
    empty_milliseconds: float


def measure(
    tls: bool, islands: int, megabytes: Sequence[float], repeats: int, folder: Path
) -> list[Rate]:
    """Measure the rates of messages of several sizes.

    Args:
        tls: use mutual TLS.
        islands: number of connections.
        megabytes: sizes of the messages.
        repeats: number of calls that are timed per size and direction.
        folder: certificates for `localhost` and `site`.

    Returns:
        The rates, by size.
    """
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
        return [_rate(connections, tls, size, repeats) for size in megabytes]
    finally:
        server.kill()
        server.join()


def _rate(connections: list[Connection], tls: bool, megabytes: float, repeats: int) -> Rate:
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
    return Rate(
        tls,
        len(connections),
        megabytes,
        total / push_median,
        total / pull_median,
        total / push_least,
        total / pull_least,
        1000 * seconds(Message({"kind": "push"}))[0],
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


def main(argv: Sequence[str] | None = None) -> list[Rate]:
    """Print the table, and write the measurements as JSON if a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--megabytes", type=numbers, default="0.1,1,10,100", help="sizes of the messages"
    )
    parser.add_argument("--islands", type=integers, default="1,4", help="numbers of connections")
    parser.add_argument("--repeats", type=int, default=7, help="timed calls per size")
    parser.add_argument("--out", help="a JSON file for the measurements")
    options = parser.parse_args(argv)
    rates = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "certificates"
        make_certificates(folder, ["localhost", "site"])
        print("MB/s: median (best)")
        print("encryption  islands  message MB         push         pull  empty call ms")
        for islands in options.islands:
            for tls in (False, True):
                for rate in measure(tls, islands, options.megabytes, options.repeats, folder):
                    rates.append(rate)
                    print(
                        f"{'mutual TLS' if tls else 'none':10}  {islands:7}  "
                        f"{rate.megabytes:10g}  {rate.push:5.0f} ({rate.best_push:4.0f})  "
                        f"{rate.pull:5.0f} ({rate.best_pull:4.0f})  "
                        f"{rate.empty_milliseconds:13.1f}",
                        flush=True,
                    )
    if options.out:
        write(options.out, rates, repeats=options.repeats)
    return rates


if __name__ == "__main__":
    main()
