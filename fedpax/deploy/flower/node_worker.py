"""A worker of a node, which outlives Flower's processes: JAX is imported and compiled once."""

import contextlib
import hashlib
import importlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpax.deploy.packets import Packet, receive, send
from fedpax.errors import FedpaxError
from fedpax.files import lock_file

STATE_DIR = "FEDPAX_STATE_DIR"
"""Environment variable: the folder of kept states. Default: ~/.fedpax/flower."""
IDLE_SECONDS = 900.0
"""A worker without messages ends after this time."""
SECONDS_TO_START = 300.0
_SECONDS_BETWEEN_CHECKS = 2.0


class WorkerError(FedpaxError):
    """A worker that cannot be started or reached; the message names its log."""


def state_dir(config: Mapping[str, Any]) -> Path:
    """Return the folder of kept states of a node, from its settings or the environment."""
    named = config.get("state-dir") or os.environ.get(STATE_DIR) or "~/.fedpax/flower"
    return Path(str(named)).expanduser().absolute()


def forward(packet: Packet, node: int, specification: Mapping[str, Any]) -> Packet:
    """Send a packet to the worker of a node, which is started if there is none."""
    folder = socket_folder()
    identity = json.dumps([node, sys.executable, specification], sort_keys=True)
    name = hashlib.sha256(identity.encode()).hexdigest()[:24]
    path = folder / f"{name}.sock"
    with (folder / f"{name}.lock").open("w") as lock:
        lock_file(lock, wait=True)  # one start, if two messages arrive together
        connection = _connect(path) or _start(path, specification)
    with connection:
        send(connection, packet)
        return receive(connection)


def socket_folder() -> Path:
    """Return the folder of sockets, which this user alone can enter."""
    # The path of a socket has at most 104 bytes on macOS and 108 on Linux.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < 50 else "/tmp"
    folder = Path(base) / f"fedpax-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise WorkerError(
            f"{folder} is not a private folder of this user, expected owner {os.getuid()} and mode "
            "0700. Remove it, or set TMPDIR to a folder of your own."
        )
    return folder


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        return connection
    except OSError:
        connection.close()
        return None


def _start(path: Path, specification: Mapping[str, Any]) -> socket.socket:
    """Start a worker, and connect to it."""
    log = path.with_suffix(".log")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", _start.__module__, str(path)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, json.dumps(specification)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if (connection := _connect(path)) is not None:
            return connection
        if process.poll() is not None:
            break
        time.sleep(0.02)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise WorkerError(
        f"The worker of this node did not start: {' '.join(last) or 'no output'}. Its log is {log}."
    )


def _serve(path: Path, specification: Mapping[str, Any]) -> None:
    """Answer packets until no message comes, or the SuperNode has ended."""
    with socket.socket(socket.AF_UNIX) as server:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # of a worker that was killed
        server.bind(str(path))
        server.listen()
        supernode = int(specification["supernode"])
        threading.Thread(target=_end_with, args=(supernode, path), daemon=True).start()
        # JAX is imported while the first message waits in the queue.
        node = _make_node(specification)
        server.settimeout(_SECONDS_BETWEEN_CHECKS)
        last = time.monotonic()
        while time.monotonic() - last < IDLE_SECONDS:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            with connection, contextlib.suppress(ConnectionError):
                connection.settimeout(60)
                packet = receive(connection)
                answer = node.answer(packet, packet.values["config"])
                send(connection, answer)
            if isinstance(node, _Refusing):
                break  # the next message starts another one, perhaps with the cause mended
            last = time.monotonic()
        path.unlink(missing_ok=True)


def _end_with(process: int, path: Path) -> None:
    """End this process once another one has ended, also in the middle of a message."""
    while _lives(process):
        time.sleep(_SECONDS_BETWEEN_CHECKS)
    path.unlink(missing_ok=True)
    os._exit(0)


def _make_node(specification: Mapping[str, Any]) -> Any:
    from fedpax.deploy.nodes.node import NodeProgram, refusal_words
    from fedpax.deploy.round_program import read_program

    try:
        return NodeProgram(
            read_program(specification["program"]),
            resolve(specification["load_data"]),
            Path(specification["state_dir"]),
            counts_releases=True,
        )
    except Exception as error:
        return _Refusing(refusal_words(error))


class _Refusing:
    """Answers each packet with the reason why the program cannot run."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def answer(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        del packet, config
        return Packet({"refusal": self.reason})


def resolve(name: str) -> Any:
    """Return the object of a name `"module:object"`."""
    module, _, attribute = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # Without an init process, an ended process can stay as a zombie.
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return not Path("/proc/self").exists()  # systems without /proc, such as macOS


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), json.loads(sys.argv[2]))
