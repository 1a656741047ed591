"""Sites with certificates as commands: one is expelled, and one has another's name."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from site_processes import Processes, wait_until

from sites.federation import write_hospitals

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")

HERE = Path(__file__).parent


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "runs").mkdir()
    sites = Processes(tmp_path / "runs", "kill_points:table")
    sites.address = sites.address.replace("127.0.0.1", "localhost")
    yield sites
    sites.end()


def fedpax(*arguments: str) -> None:
    command = [sys.executable, "-m", "fedpax.main", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def test_a_site_is_expelled_and_returns(processes: Processes, tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", {"a": (40,), "b": (30,), "c": (20,)})
    keys, counted = tmp_path / "keys", tmp_path / "runs" / "counted.jsonl"
    fedpax("certificates", f"--out={keys}", "--names=localhost,a,b,c")
    fedpax("certificates", f"--out={tmp_path}/more", "--names=c", f"--authority={keys}/authority")
    endless = "--training.rounds=100000"
    flags = (endless, "--min_sites=2", "--silent_after=5", f"--certificates={keys}/localhost")
    processes.start("syncer", "fed", *flags, cwd=HERE, COUNTED=str(counted), FIRST_SITES="3")

    def join(name: str, folder: str, key: Path) -> subprocess.Popen:
        files = f"--data.files={tmp_path}/data/{name}/*.csv"
        return processes.start(
            "join", folder, endless, files, f"--certificates={key / name}", cwd=HERE
        )

    def rounds() -> list[list[str]]:
        lines = counted.read_text().splitlines() if counted.exists() else []
        return [json.loads(line)[1] for line in lines]

    def later(names: list[str]) -> None:
        """Wait for a round of some sites that begins from now on."""
        done = len(rounds())
        wait_until(lambda: names in rounds()[done + 1 :], processes)

    join("a", "a", keys), join("b", "b", keys)
    first = join("c", "c", keys)
    later(["a", "b", "c"])
    second = join("c", "other", tmp_path / "more")  # another certificate of the same name
    wait_until(lambda: "another process of site 'c'" in processes.log("other"), processes)
    later(["a", "b", "c"])
    folder = f"--job_log_dir={tmp_path}/runs/fed"
    fedpax("sites", "expel", "c", "--reason=it cheats", folder)
    assert first.wait(60) == second.wait(60) == 2
    for name in ("c", "other"):
        assert "expelled" in processes.log(name) and "it cheats" in processes.log(name)
    later(["a", "b"])
    assert join("c", "c", keys).wait(120) == 2
    fedpax("sites", "admit", "c", folder)
    join("c", "c", keys)
    later(["a", "b", "c"])
