"""All commands of docs/consortium.md, in their order, in an empty folder."""

import re
from pathlib import Path

import pytest
from site_processes import free_port, run_script

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
    session = ""
    for kind, block in BLOCK.findall(PAGE.read_text()):
        if kind == "python":
            session += block  # a block continues the session of those above
            (tmp_path / "session.py").write_text(session)
            script = "python session.py"
        else:
            words = block.replace(":7000", f":{free_port()}")
            script = words.replace("syncer.example.org", "localhost") + "wait\n"
        run_script(script, tmp_path)
    assert {name: latest_round(tmp_path / "runs" / name) for name in RUNS} == RUNS
    assert (tmp_path / "model").exists()
