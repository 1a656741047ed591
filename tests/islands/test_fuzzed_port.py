"""Random bytes, frames, messages and replays at the port of a syncer whose islands train on."""

import contextlib
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from site_processes import Processes, updates_of, wait_until

from fedpax.checkpoints import load_params
from fedpax.experiments.benchmarks.unreliable_network import UnreliableNetwork
from fedpax.transport.certificates import make_certificates
from fedpax.transport.message import Message, encode

pytestmark = pytest.mark.slow
METHOD = "/fedpax.Sites/Call"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FIELDS = (
    *("kind", "island", "incarnation", "folder", "run", "shard", "identity", "steps", "versions"),
    "epoch",
    *("fragment", "sequence", "merge", "count", "base", "tokens", "update_steps", "loss"),
    *("heard_end", "seconds_per_update"),
)
VALUES = (
    *(None, True, -1, 0, 1, 2**53, 10**30, 0.5, 1e308, "", "a", "b", "\x1b[2J", "x" * 500),
    *([], [0, 0], [-1, 2**70], {}, {"version": 1}, {"experiment": {"\n": []}}),
)


class Recorder(UnreliableNetwork):
    """A proxy that keeps the bytes which an island sends to its syncer, by connection."""

    def __init__(self, server_port: int) -> None:
        self.recorded: dict[socket.socket, bytearray] = {}
        super().__init__(server_port)

    def _forward(self, source: socket.socket, sink: socket.socket, is_sent: bool) -> None:
        if not is_sent:
            return super()._forward(source, sink, is_sent)
        kept = self.recorded.setdefault(source, bytearray())
        with contextlib.suppress(OSError):
            while block := source.recv(1 << 18):
                kept += block
                sink.sendall(block)
        for end in (source, sink):
            end.close()
        return None


class Attack:
    """Attacks on one port; each takes at most about a second."""

    def __init__(self, port: int, seed: int, channel: Callable[[], grpc.Channel]) -> None:
        self.port, self.rng, self.channel = port, random.Random(seed), channel

    def send(self, content: bytes, wrap: ssl.SSLContext | None = None) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connected = socket.create_connection(("127.0.0.1", self.port), 2)
            stranger = stack.enter_context(connected)
            stranger.settimeout(0.5)
            if wrap:
                stranger = stack.enter_context(wrap.wrap_socket(stranger))
            stranger.sendall(content)
            stranger.recv(1 << 16)

    def random_bytes(self) -> None:
        self.send(self.rng.randbytes(self.rng.randrange(1, 5000)))

    def random_frames(self) -> None:
        frames = []
        for _ in range(self.rng.randrange(1, 30)):
            body = self.rng.randbytes(self.rng.choice([0, 1, 4, 5, 8, 100]))
            kind, flags = self.rng.randrange(12), self.rng.randrange(256)
            stream = self.rng.choice([0, 1, 1, 3, 2, 2**31 - 1])
            length = self.rng.choice([len(body)] * 9 + [2**24 - 1])
            head = length.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
            frames.append(head + body)
        self.send(PREFACE + b"".join(frames))

    def tls_strangers(self) -> None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.send(PREFACE, context)
        self.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.randbytes(300))

    def half_open(self) -> None:
        opened = []
        with contextlib.suppress(OSError):
            opened = [
                socket.create_connection(("127.0.0.1", self.port), 2)
                for _ in range(self.rng.randrange(50, 200))
            ]
        for stranger in opened[::2]:
            with contextlib.suppress(OSError):
                stranger.sendall(PREFACE[: self.rng.randrange(40)])
        time.sleep(0.5)
        for stranger in opened:
            stranger.close()

    def call(self, streams: list[list[bytes]], *, end: bool = True) -> None:
        """Send chunks as calls, side by side; without an end they are silent for a moment."""
        released = threading.Event()

        def chunks(stream: list[bytes]) -> Iterator[bytes]:
            yield from stream
            if not end:
                released.wait(1.0)

        with self.channel() as channel:
            calls = [channel.stream_stream(METHOD)(chunks(s), timeout=1.0) for s in streams]
            if not end:
                time.sleep(0.5)
                released.set()
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    list(call)

    def message(self) -> list[bytes]:
        kind = self.rng.choice(["join", "push", "pull", "heartbeat", "leave"])
        header = {"kind": kind, "island": self.rng.choice(["a", "b", "mallory"]), "steps": 1}
        header |= {"incarnation": "1", "folder": "f", "versions": [-1, -1], "fragment": 0}
        header |= {"sequence": 1, "merge": 0, "count": 0, "base": 0, "tokens": 16.0}
        header |= {"update_steps": 2, "loss": 1.0}
        for name in self.rng.sample(FIELDS, self.rng.randrange(4)):
            header[name] = self.rng.choice(VALUES)
        arrays = {}
        if self.rng.random() < 0.5:
            shape = self.rng.choice([(16, 32), (32,), (0,), (300_000,)])
            arrays["hidden"] = np.full(shape, self.rng.choice([np.nan, 1e30, 0.1]), np.float32)
        return list(encode(Message(header, arrays), 1 << 30))

    def messages(self) -> None:
        self.call([self.message() for _ in range(20)])

    def damaged_messages(self) -> None:
        streams = []
        for _ in range(20):
            chunks = self.message()
            match self.rng.randrange(5):
                case 0:
                    self.rng.shuffle(chunks)
                case 1:
                    chunks *= 3
                case 2:
                    chunks = chunks[:1] + [self.rng.randbytes(100) for _ in range(5)]
                case 3:
                    chunks[0] = self.rng.randbytes(len(chunks[0]))
                case 4:
                    place = self.rng.randrange(len(chunks[-1]))
                    chunks[-1] = chunks[-1][:place] + b"\xff" + chunks[-1][place + 1 :]
            streams.append(chunks)
        self.call(streams)

    def gigantic_messages(self) -> None:
        like = Message({"kind": "push"}, {"hidden": np.zeros(1 << 24, np.float32)})
        first = next(encode(like, 1 << 30))
        self.call([[first, bytes(1 << 20)] for _ in range(20)])

    def silent_calls(self) -> None:
        self.call([[] for _ in range(150)] + [self.message()[:1] for _ in range(50)], end=False)

    def all(self) -> list[Callable[[], None]]:
        return [
            *(self.random_bytes, self.random_frames, self.tls_strangers, self.half_open),
            *(self.messages, self.damaged_messages, self.gigantic_messages, self.silent_calls),
        ]


def memory_megabytes(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@pytest.mark.parametrize("tls", [False, True], ids=["loopback", "tls"])
def test_islands_train_on_under_attack(tmp_path: Path, tls: bool) -> None:
    seed = int(os.environ.get("FEDPAX_FUZZ_SEED", "0"))
    certificates: dict[str, list[str]] = {name: [] for name in ("localhost", "a", "b")}
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    processes = Processes(tmp_path)
    port = int(processes.address.rpartition(":")[2])
    channel: Callable[[], grpc.Channel]
    channel = lambda: grpc.insecure_channel(f"127.0.0.1:{port}", options)
    if tls:
        own = tmp_path / "own"
        make_certificates(own, ["localhost", "a", "b", "mallory"])
        for name in certificates:
            certificates[name] = [f"--certificates={own / name}"]
        files = ("authority.pem", "key.pem", "certificate.pem")
        credentials = grpc.ssl_channel_credentials(
            *((own / "mallory" / name).read_bytes() for name in files)
        )
        options.append(("grpc.ssl_target_name_override", "localhost"))
        channel = lambda: grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)
    attack = Attack(port, seed, channel)
    endless = "--training.rounds=1000000"
    with Recorder(port) as recorder:
        try:
            syncer = processes.start("syncer", "syncer", endless, *certificates["localhost"])
            names = ["--server_name=localhost"] if tls else []
            through = f"--syncer=127.0.0.1:{recorder.port}"
            islands = [
                processes.start("join", "a", endless, through, *names, *certificates["a"]),
                processes.start("join", "b", endless, *names, *certificates["b"]),
            ]
            wait_until(lambda: processes.islands_since(0) == {"a", "b"}, processes)
            before = memory_megabytes(syncer.pid)
            for _ in range(3):
                for strike in attack.all():
                    at = processes.merges()
                    strike()
                    wait_until(lambda at=at: processes.merges() > at, processes, 60)
                for recorded in list(recorder.recorded.values()):
                    attack.send(bytes(recorded))  # the calls of island a, once more
                    attack.send(bytes(recorded[: len(recorded) // 2]))
            at = processes.merges()
            wait_until(lambda: processes.islands_since(at) == {"a", "b"}, processes)
            # 128 threads of calls take a part of it.
            assert memory_megabytes(syncer.pid) < before + 400, processes.logs()

            syncer.send_signal(signal.SIGTERM)
            assert syncer.wait(240) == 143, processes.logs()
            rounds = processes.merges() // 2 + 5
            change = (f"--training.rounds={rounds}", "--allow_config_change=training.rounds")
            end = (*change, "--goodbye_seconds=240", *certificates["localhost"])
            syncer = processes.start("syncer", "syncer", *end)
            assert [p.wait(240) for p in (syncer, *islands)] == [0, 0, 0], processes.logs()
        finally:
            processes.end()
    updates = updates_of(tmp_path / "syncer")
    assert len(updates) == len(set(updates))  # a replayed update is not applied
    assert {island for island, *_ in updates} == {"a", "b"}
    assert len({process for _, process, *_ in updates}) == 2
    assert all(np.isfinite(x).all() for x in load_params(tmp_path / "syncer").values())
    log = processes.log("syncer")
    assert "Traceback" not in log and "\x1b[2J" not in log
