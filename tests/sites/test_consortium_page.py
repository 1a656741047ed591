"""All commands of docs/consortium.md, in their order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from site_processes import free_port

from fedpax.run_files.paths import latest_round

pytestmark = pytest.mark.slow
pytest.importorskip("grpc")

PAGE = Path(__file__).parents[2] / "docs" / "consortium.md"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Rounds of each run in the end; "hospital" is the folder of a site's certificate.
RUNS = {
    **dict.fromkeys(("fed", "oslo", "lyon"), 20),
    **dict.fromkeys(("private", "oslo_private", "lyon_private"), 20),
    **dict.fromkeys(("adapters", "oslo_adapters", "lyon_adapters"), 20),
    **dict.fromkeys(("scans", "oslo_scans", "lyon_scans"), 5),
    **dict.fromkeys(("hospitals", "hospital-1", "hospital-2"), 20),
}


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, module in (("fedpax", "-m fedpax.main"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        command.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "JAX_NUM_CPU_DEVICES": "1",
        "PYTHONPATH": str(PAGE.parents[1]),
    }
    session = ""
    for kind, block in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            session += block  # a block continues the session of those above
            (tmp_path / "session.py").write_text(session)
            script = "python session.py"
        else:
            words = block.replace(":7000", f":{free_port()}")
            script = words.replace("syncer.example.org", "localhost") + "wait\n"
        done = subprocess.run(
            ["bash", "-e", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    assert {name: latest_round(tmp_path / "runs" / name) for name in RUNS} == RUNS
    assert (tmp_path / "model").exists()
