"""Tests of an island's connection to a server that is killed or stopped."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedpax.transport.calls import DisconnectedError, connect
from fedpax.transport.message import Message

SERVER = """
import sys, time
from fedpax.transport.calls import serve
with serve(lambda peer, message: message, f"localhost:{sys.argv[1]}") as server:
    print(server.port, flush=True)
    time.sleep(60)
"""


def start_server(port: int = 0) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_process_that_is_killed_or_stopped() -> None:
    process, port = start_server()
    try:
        with connect(f"localhost:{port}") as connection, ThreadPoolExecutor() as threads:
            message = Message({}, {"x": np.random.default_rng(0).normal(size=100)})
            connection.call(message, timeout=10)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # all of its threads have stopped
            with pytest.raises(DisconnectedError, match=r"no answer within 0\.2 s"):
                connection.call(message, timeout=0.2)
            waiting = threads.submit(connection.call, message, 10)
            os.kill(process.pid, signal.SIGCONT)
            np.testing.assert_array_equal(waiting.result().arrays["x"], message.arrays["x"])

            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            waiting = threads.submit(connection.call, message, 10)
            time.sleep(0.1)
            process.kill()
            with pytest.raises(DisconnectedError, match="no connection"):  # not "no answer within"
                waiting.result()
            process.wait()
    finally:
        process.kill()
        process.wait()
