"""A run in a bucket that s3fs mounts: killed, mounted again and resumed."""

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import chex
import pytest
from several_processes import free_port, start_one
from small_regression import regression

from fedpax.checkpoints.orbax_files import is_object_store
from fedpax.checkpoints.saved_state import load_params
from fedpax.run_files.paths import latest_round
from fedpax.training.trainer import train

pytestmark = pytest.mark.slow

BUCKET = "runs"


@pytest.fixture
def store() -> Iterator[str]:
    """Return the address of an object store with an empty bucket."""
    if not (shutil.which("moto_server") and shutil.which("s3fs")):
        pytest.skip("s3fs and moto_server (pip install 'moto[server,s3]') are not installed")
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    server = subprocess.Popen(
        ["moto_server", "-H", host, "-p", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            connection = http.client.HTTPConnection(address)
            try:
                connection.request("PUT", f"/{BUCKET}")
                break
            except ConnectionRefusedError:
                assert server.poll() is None
                time.sleep(0.2)
        assert connection.getresponse().status == 200
        yield address
    finally:
        server.terminate()
        server.wait()


def mount(address: str, folder: Path, keys: Path) -> None:
    options = f"passwd_file={keys},url=http://{address},use_path_request_style"
    subprocess.run(["s3fs", BUCKET, folder, "-o", options], check=True)
    deadline = time.monotonic() + 20
    while not is_object_store(folder):
        assert time.monotonic() < deadline, "s3fs does not mount; is there /dev/fuse?"
        time.sleep(0.1)


def unmount(folder: Path) -> None:
    subprocess.run(["fusermount3", "-uz", folder], check=False)


def test_killed_and_resumed_after_another_mount(tmp_path: Path, store: str) -> None:
    keys, bucket, disk = tmp_path / "keys", tmp_path / "bucket", tmp_path / "disk"
    keys.write_text("key:secret")
    keys.chmod(0o600)
    bucket.mkdir()
    try:
        mount(store, bucket, keys)
        arguments = [
            "train",
            "--exp=small_regression:regression",
            f"--job_log_dir={bucket / 'run'}",
        ]
        process = start_one([*arguments, "--pause=0.3"], None)
        try:
            # A checkpoint is due every third round; the one of round 6 may be unfinished.
            next(line for line in process.stderr if "round 8/12: held-out loss" in line)
        finally:
            process.kill()
            process.communicate()
        unmount(bucket)

        mount(store, bucket, keys)
        assert 0 < (latest_round(bucket / "run") or 0) < 12
        process = start_one([*arguments, "--allow_config_change=pause"], None)
        output, errors = process.communicate(timeout=200)
        assert output.startswith("Finished 12 of 12 rounds"), errors
        train(regression(), disk)
        chex.assert_trees_all_equal(load_params(bucket / "run"), load_params(disk))
    finally:
        unmount(bucket)
