"""A server that forks training processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# A supervisor that starts two training processes, one after another.
SUPERVISOR = """
import os, sys, time
from fedpax.commands import fork_server as server

def say(*words):  # in one write: two processes share the pipe, and Python may be unbuffered
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

server.LIBRARIES = ("json.tool", "no_such_module")
served = server.fork_server()
if isinstance(served, list):
    status = sys.argv.index("json.tool" if "json.tool" in sys.modules else "-")
    say(served[0], os.environ["PLACE"], os.getppid())
    time.sleep(float(served[1]))
    sys.exit(status)
while not served.is_ready(1.0):
    pass
for arguments, place in ((["first", "0"], "a"), (["second", "600"], "b")):
    served.train(arguments, {"PLACE": place})
    say("started", served.pid, served.training)
    if place == "b":
        sys.stdin.readline()
        served.signal(9)
    while (status := served.poll()) is None:
        time.sleep(0.01)
    say("ended", status, served.training)
sys.stdin.readline()
served.close()
"""


def start() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, "json.tool"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read(process: subprocess.Popen) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def has_ended(pid: int) -> bool:
    deadline = time.monotonic() + 20
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic() < deadline


def test_training_processes_start_and_end() -> None:
    process = start()
    assert process.stdin is not None
    lines = [read(process) for _ in range(3)]  # the child and the supervisor print in any order
    first = next(line for line in lines if line[0] == "started")
    assert ["first", "a", first[1]] in lines  # forked from the server
    assert lines[2] == ["ended", "1", "None"] or ["ended", "1", "None"] in lines
    lines = [read(process) for _ in range(2)]
    second = next(line for line in lines if line[0] == "started")
    assert ["second", "b", first[1]] in lines and second[2] != first[2]
    process.stdin.write("\n")
    process.stdin.flush()
    assert read(process) == ["ended", "-9", "None"]
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(20) == 0
    assert has_ended(int(first[1]))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no PR_SET_PDEATHSIG")
def test_the_server_and_its_process_end_with_the_supervisor() -> None:
    process = start()
    lines = [read(process) for _ in range(5)]
    second = [line for line in lines if line[0] == "started"][-1]
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    assert has_ended(int(second[1])) and has_ended(int(second[2]))
