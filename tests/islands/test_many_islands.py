"""One syncer process holds 64 islands of the demo's model that send real bytes: bounded memory."""

import concurrent.futures
import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from fedpax.experiments.decoupled_diloco_text import decoupled_diloco_text
from fedpax.islands.method_parts import build_parts
from fedpax.islands.syncer.outer_model import OuterModel
from fedpax.parallel.mesh import SINGLE_DEVICE
from fedpax.sites.site_process import identify
from fedpax.transport.calls import DisconnectedError, connect
from fedpax.transport.message import Message

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")
ISLANDS, ROUNDS = 64, 2


def memory_bytes(process: subprocess.Popen, field: str) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_64_islands_in_bounded_memory(tmp_path: Path) -> None:
    flags = [f"--islands={ISLANDS}", f"--decoupled.quorum={ISLANDS}", f"--training.rounds={ROUNDS}"]
    demo = decoupled_diloco_text()
    experiment = dataclasses.replace(
        demo,
        islands=ISLANDS,
        decoupled=dataclasses.replace(demo.decoupled, quorum=ISLANDS),
        training=dataclasses.replace(demo.training, rounds=ROUNDS),
    )
    run = build_parts(experiment, SINGLE_DEVICE)
    params = jax.eval_shape(run.init, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), params)
    formats = OuterModel(run.algorithm.parts._replace(islands=1), zeros).formats
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "fedpax.main", "syncer", "--exp=decoupled_diloco_text"),
            *("--listen=127.0.0.1:0", f"--job_log_dir={tmp_path / 'run'}", *flags),
        ],
        stderr=log,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    try:
        deadline = time.monotonic() + 300
        while not (match := re.search(r"at (\S+:\d+);", (tmp_path / "log").read_text())):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        before = memory_bytes(process, "VmRSS")
        address, identity = match[1], identify(experiment, params)._asdict()

        def island(k: int) -> int:
            rng = np.random.default_rng(k)
            header = {"island": f"site{k}", "incarnation": f"process{k}", "steps": 8}
            joining = {"kind": "join", "folder": str(k), "identity": identity}
            sent = 0
            with connect(address) as connection:

                def call(fields: dict, arrays: dict | None = None) -> dict:
                    while True:
                        try:
                            message = Message({**header, **fields}, arrays or {})
                            return dict(connection.call(message, timeout=120.0).header)
                        except DisconnectedError:
                            time.sleep(0.5)

                call(joining)
                for merge in range(ROUNDS * len(formats)):
                    p = merge % len(formats)
                    arrays = {
                        name: 1e-3 * rng.normal(size=like.shape).astype(np.float32)
                        for name, like in formats[p].wire_shapes.items()
                    }
                    push = {"kind": "push", "sequence": merge + 1, "fragment": p, "merge": merge}
                    push |= {"count": 0, "base": 0, "tokens": 64.0, "update_steps": 8, "loss": 1.0}
                    assert call(push, arrays)["status"] in ("accepted", "repeated")
                    sent += sum(x.nbytes for x in arrays.values())
                    while call({"kind": "heartbeat", "seconds_per_update": 1.0})["merges"] <= merge:
                        time.sleep(0.2)
                call({"kind": "leave"})
            return sent

        with concurrent.futures.ThreadPoolExecutor(ISLANDS) as pool:
            sent = sum(pool.map(island, range(ISLANDS)))
        peak = memory_bytes(process, "VmHWM") - before
        assert process.wait(120) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    fragments = [sum(x.size for x in form.shapes.values()) * 4 for form in formats]
    assert sent == ISLANDS * ROUNDS * sum(fragments)
    print(f"sent {sent / 1e6:.0f} MB, memory {peak / 1e6:.0f} MB beyond {before / 1e6:.0f} MB")
    print(f"largest fragment {max(fragments) / 1e6:.2f} MB")
    # Copies of one fragment of all islands: received, decoded, stacked, on the device, and the
    # aggregator's intermediate values.
    assert peak < 24 * ISLANDS * max(fragments)
