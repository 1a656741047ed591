"""Runs whose checkpoints are in a bucket of a Cloud Storage server that runs on this machine."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from several_processes import finish, free_port, start_one

from fedpax.checkpoints import load_params
from fedpax.run_files.metrics import read_metrics
from fedpax.run_files.paths import METRICS

SERVER = Path(__file__).with_name("bucket_server.py")
EXP = "--exp=small_regression:regression"
TRAIN = ("train", EXP, "--training.checkpoint_dir=gs://runs/run")
READ = """
import sys
from fedpax.run_files.paths import complete_rounds
from fedpax.checkpoints.saved_state import load_params
from fedpax.checkpoints.checkpoint_files import find_damage
from fedpax.run_files.paths import resolve_folder

folder = resolve_folder("gs://runs/run")
print(complete_rounds(folder / "checkpoints"))
print({name: leaf.tobytes().hex() for name, leaf in sorted(load_params(folder).items())})
if len(sys.argv) > 1:
    sys.exit()
checksums = folder / "checkpoints" / "12" / "checksums.json"
checksums.write_text(checksums.read_text().replace("progress/metadata", "progress/gone"))
print(find_damage(folder / "checkpoints" / "12"))
metadata = folder / "checkpoints" / "9" / "progress" / "metadata"
metadata.write_text(metadata.read_text().replace("9", "8"))
print(find_damage(folder / "checkpoints" / "9"))
"""

pytestmark = pytest.mark.slow


class Server:
    """A server with an empty bucket `runs`; its files stay when it is stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        self.start()

    def start(self, *arguments: str) -> None:
        command = [sys.executable, SERVER, str(self.port), *arguments]
        log = (self.folder / "log").open("a")
        launch = lambda: subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self.process, deadline = launch(), time.monotonic() + 120
        while not self._answers():
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.1)
            # While the server was stopped, a connection of another process can take its port.
            if self.process.poll() is not None:
                self.process = launch()

    def _answers(self) -> bool:
        """Return whether the bucket is there: a port alone can be open before, or be another's."""
        try:
            url = f"http://127.0.0.1:{self.port}/storage/v1/b/runs"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which a process finds this server, and needs no account."""
        address = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "GCE_METADATA_HOST": "127.0.0.1:1",
            "GCE_METADATA_ROOT": "127.0.0.1:1",
            "GCE_METADATA_IP": "127.0.0.1:1",
            "GOOGLE_CLOUD_PROJECT": "test",
        }

    def start_one(self, *arguments: str, **variables: str) -> subprocess.Popen:
        return start_one(arguments, {**os.environ, **self.environment, **variables})

    def run(self, *arguments: str) -> tuple[int, str, str]:
        (completed,) = finish([self.start_one(*arguments)])
        return completed


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    server = Server(tmp_path / "server")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run on a disk."""
    folder = tmp_path_factory.mktemp("plain")
    process = start_one([*TRAIN[:2], f"--job_log_dir={folder}"], None)
    ((status, _, errors),) = finish([process])
    assert status == 0, errors
    return folder


def read(server: Server, *arguments: str) -> list[str]:
    """Return the lines that `READ` prints."""
    return subprocess.run(
        [sys.executable, "-c", READ, *arguments],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def params_of(folder: Path) -> str:
    return str({k: leaf.tobytes().hex() for k, leaf in sorted(load_params(folder).items())})


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if line["kind"] == "training"]


def test_killed_while_saving_and_resumed_on_another_machine(
    server: Server, tmp_path: Path, plain: Path
) -> None:
    first, second = f"--job_log_dir={tmp_path / 'first'}", f"--job_log_dir={tmp_path / 'second'}"
    process = server.start_one(*TRAIN, first, "--training.export_every=6", "--pause=0.3")
    saving = server.folder / ".cloudstorage" / "runs" / "run" / "checkpoints" / "6"
    while not saving.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    shutil.rmtree(tmp_path / "first")

    arguments = ("--training.export_every=6", "--allow_config_change=pause")
    status, output, trained = server.run(*TRAIN, second, *arguments)
    errors = trained
    assert status == 0 and output.startswith("Finished 12 of 12 rounds"), errors
    assert "and not released. Waiting 45 s to see whether it still trains" in errors
    assert "resuming from round 3" in errors or "resuming from round 6" in errors
    assert losses(tmp_path / "second") == losses(plain)
    shutil.rmtree(tmp_path / "second")

    _, shown, _ = server.run("show", "--job_log_dir=gs://runs/run")
    assert "|  12/12 |" in shown and "| finished |" in shown
    _, measured, _ = server.run("evaluate", EXP, "--job_log_dir=gs://runs/run", "--round=6")
    _, expected, _ = server.run("evaluate", EXP, f"--job_log_dir={plain}", "--round=6")
    assert measured == expected and "round 6: held-out loss" in measured
    out = tmp_path / "model"
    status, _, errors = server.run(
        "export", EXP, "--job_log_dir=gs://runs/run", f"--out={out}", "--format=orbax"
    )
    assert status == 0 and (out / "config.json").exists(), errors
    exports = server.folder / ".cloudstorage" / "runs" / "run" / "exports"
    assert {path.name for path in exports.iterdir()} == {"6", "12"}

    assert read(server) == [
        "[6, 9, 12]",
        params_of(plain),
        "progress/gone is missing",
        "progress/metadata has another checksum",
    ], trained
    # Nothing is left to train, but the damage is found.
    status, _, errors = server.run(*TRAIN, second, *arguments)
    assert status == 2 and "The checkpoint of round 12 is damaged: progress/gone is" in errors


def test_a_run_outlives_a_server_that_is_away(server: Server, tmp_path: Path, plain: Path) -> None:
    folder = tmp_path / "run"
    process = server.start_one(*TRAIN, f"--job_log_dir={folder}", "--pause=1")
    while not (folder / METRICS).exists() or len(losses(folder)) < 4:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    server.stop()
    time.sleep(60)
    server.start()
    ((status, output, errors),) = finish([process])
    assert status == 0 and output.startswith("Finished 12 of 12 rounds"), errors
    assert losses(folder) == losses(plain)
    assert "Traceback" not in errors, errors
    assert read(server, "params alone")[1] == params_of(plain)


@pytest.mark.parametrize(("refuse", "hold"), [("", "none"), ("_CHECKPOINT_METADATA", "state/")])
def test_the_last_save_is_tried_again(
    server: Server, tmp_path: Path, plain: Path, refuse: str, hold: str
) -> None:
    """Refuse an upload of the last checkpoint, whose files are then in the bucket in part.

    Orbax raises the error of the metadata while it still uploads the state.
    """
    server.stop()
    server.start(f"--refuse=checkpoints/12/{refuse}", f"--hold=checkpoints/12/{hold}")
    folder = tmp_path / "run"
    status, output, errors = server.run(*TRAIN, f"--job_log_dir={folder}")
    assert status == 0 and output.startswith("Finished 12 of 12 rounds"), errors
    assert errors.count("The checkpoint of round 12 cannot be written") == 1, errors
    assert losses(folder) == losses(plain)
    assert read(server, "params alone")[1] == params_of(plain)


def test_a_run_with_parts_of_the_clients_states_resumes_on_another_machine(
    server: Server, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    exp = ("train", "--exp=small_stores:stores")
    ((status, _, errors),) = finish([start_one([*exp, f"--job_log_dir={plain}"], None)])
    assert status == 0, errors
    for rounds in (5, 16):
        status, _, errors = server.run(
            *exp,
            f"--job_log_dir={tmp_path / str(rounds)}",
            "--training.checkpoint_dir=gs://runs/run",
            f"--training.rounds={rounds}",
        )
        assert status == 0, errors
    checkpoints = server.folder / ".cloudstorage" / "runs" / "run" / "checkpoints"
    assert json.loads((checkpoints / "14" / "parent.json").read_text())["round"] == 12
    assert not (checkpoints / "16" / "parent.json").exists()
    code = """
import hashlib, sys
import jax
from fedpax.checkpoints import load_field
from fedpax.checkpoints.checkpoint_files import find_damage
from fedpax.run_files.paths import resolve_folder

folder = sys.argv[1]
for number in (14, 16):
    rows = jax.tree.leaves(load_field(folder, "client_controls", number))
    print([hashlib.sha256(leaf.tobytes()).hexdigest() for leaf in rows])
(resolve_folder(folder) / "checkpoints" / "12" / "checksums.json").unlink(missing_ok=True)
print(find_damage(resolve_folder(folder) / "checkpoints" / "14"))
"""
    in_bucket, on_disk = (
        subprocess.run(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, **server.environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for folder in ("gs://runs/run", plain)
    )
    assert in_bucket[:2] == on_disk[:2]
    assert "the checkpoint of round 12, which" in in_bucket[2]


def test_a_bucket_that_cannot_be_used_is_refused(server: Server, tmp_path: Path) -> None:
    folder = f"--job_log_dir={tmp_path / 'run'}"
    missing = (*TRAIN[:2], folder, "--training.checkpoint_dir=gs://elsewhere/run")
    status, output, errors = server.run(*missing)
    assert (status, output) == (2, "") and "fedpax: The bucket gs://elsewhere is missing" in errors
    server.stop()
    status, output, errors = server.run(*TRAIN, folder)
    assert (status, output) == (2, "") and "The bucket gs://runs is not accessible" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


class Forbidden(BaseHTTPRequestHandler):
    """Answers as a store does to an account without permissions."""

    def do_GET(self) -> None:
        content = b'{"error": {"code": 403, "message": "no storage.objects.list access"}}'
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_an_account_without_permissions_is_refused(server: Server, tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Forbidden) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{store.server_port}"
        process = server.start_one(
            *TRAIN, f"--job_log_dir={tmp_path / 'run'}", STORAGE_EMULATOR_HOST=address
        )
        ((status, output, errors),) = finish([process])
        store.shutdown()
    assert (status, output) == (2, "") and "no storage.objects.list access" in errors
    assert "fedpax: The bucket gs://runs is not accessible" in errors


def test_processes_with_folders_of_their_own(server: Server, tmp_path: Path, plain: Path) -> None:
    def start(generation: int, *arguments: str) -> list[subprocess.Popen]:
        port = free_port()
        folders = [tmp_path / f"{generation}.{number}" for number in range(2)]
        kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES",)}
        return [
            start_one(
                [*TRAIN, f"--job_log_dir={folder}", "--multihost", *arguments],
                kept
                | server.environment
                | {
                    "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                    "JAX_NUM_PROCESSES": "2",
                    "JAX_PROCESS_ID": str(number),
                },
            )
            for number, folder in enumerate(folders)
        ]

    processes = start(0, "--pause=0.5")
    while not (tmp_path / "0.0" / METRICS).exists() or len(losses(tmp_path / "0.0")) < 8:
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.1)
    for process in processes:
        process.kill()
    finish(processes)
    ((status, output, errors), (other, _, other_errors)) = finish(
        start(1, "--allow_config_change=pause")
    )
    assert (status, other) == (0, 0), errors + other_errors
    assert output.startswith("Finished 12 of 12 rounds")
    assert "resuming from round" in errors
    assert not (tmp_path / "1.1" / METRICS).exists()  # process 0 alone writes metrics
    for result, expected in zip(losses(tmp_path / "1.0"), losses(plain), strict=True):
        assert result == pytest.approx(expected, rel=1e-5)
