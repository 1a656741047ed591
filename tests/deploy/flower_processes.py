"""Flower's SuperLink and SuperNodes as processes on loopback, for tests."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
ENVIRONMENT = "FEDPAX_FLWR"
"""Environment variable: a virtual environment with flwr, which this one need not have."""


def binaries():
    """The folder of Flower's commands, or None where flwr is not installed."""
    folder = os.environ.get(ENVIRONMENT)
    result = Path(folder) / "bin" if folder else Path(sys.executable).parent
    return result if (result / "flower-superlink").exists() else None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Flower:
    """A SuperLink, its SuperNodes, and the runs that `flwr run` starts.

    folder: for logs, Flower's own files and the nodes' disks.
    link: further arguments of flower-superlink.
    node: further arguments of each flower-supernode.
    connection: lines of the SuperLink's section in config.toml.
    """

    def __init__(
        self, folder, link=("--insecure",), node=("--insecure",), connection="insecure = true"
    ):
        self.folder, self.node_arguments = folder, list(node)
        self.port, self.processes, self.nodes = free_port(), [], {}
        # Sockets have short paths, and a worker of its own for each test.
        self.temporary = Path(f"/tmp/fedpax-flower-{os.getpid()}-{self.port}")
        self.temporary.mkdir()
        home = folder / "flwr"
        home.mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{binaries()}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY / "tests"),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "TMPDIR": str(self.temporary),
            "JAX_PLATFORMS": "cpu",
        }
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "test"\n[superlink.test]\n'
            f'address = "127.0.0.1:{self.port}"\n{connection}\n'
        )
        self._start("link", ["flower-superlink", "--port", str(self.port), *link])
        self._wait_for("link", "Application startup complete|Uvicorn running", 90)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def start_node(self, k, *arguments, config=""):
        """Start the SuperNode of a participant; its disk is `self.disk(k)`."""
        command = [
            "flower-supernode",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(free_port()),
            "--node-config",
            f'partition-id={k} state-dir="{self.disk(k)}" {config}',
        ]
        self.nodes[k] = self._start(f"node{k}", [*command, *self.node_arguments, *arguments])

    def kill_node(self, k):
        """Kill a SuperNode and all that it has started, as a loss of power does."""
        process = self.nodes.pop(k)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def disk(self, k):
        return self.folder / f"disk{k}"

    def start_run(self, app, out, **settings):
        """Start `flwr run`; return its process, whose output is `run.log`."""
        (self.folder / "run.log").unlink(missing_ok=True)
        settings = {"out": f'"{out}"', "wait": 300.0, **settings}
        config = " ".join(f"{name}={value}" for name, value in settings.items())
        return self._start(
            "run", ["flwr", "run", str(app), "test", "--stream", "--run-config", config]
        )

    def finish(self, run, out, seconds=400):
        """Wait for the last round; return the log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (out / "finished").exists() or re.search("is in .*state.npz", self.log("run")):
                return self.log("run")
            if "Error" in self.log("run") and run.poll() is not None:
                break
            time.sleep(0.5)
        raise AssertionError(f"{self.log('run')[-3000:]}\n{self.log('node0')[-1500:]}")

    def flwr(self, *arguments):
        """Run a command of Flower to its end."""
        done = subprocess.run(
            ["flwr", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, name, command):
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )
        self.processes.append(process)
        return process

    def _wait_for(self, name, pattern, seconds):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.log(name)):
            if time.monotonic() > deadline:
                raise AssertionError(f"{name}: no {pattern!r} in {self.log(name)[-2000:]}")
            time.sleep(0.2)
