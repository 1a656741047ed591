"""The wheel, in a folder of its own: what a user runs first works without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ELSEWHERE = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because the build writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("fedpax", "algorithms", "experiments", ".src"):
        shutil.copytree(ROOT / name, folder / "sources" / name, symlinks=True, ignore=ELSEWHERE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "sources")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder / "sources")]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_has_the_library_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and "fedpax" in tops, tops
    assert not [name for name in names if "benchmarks" in name or "/test_" in name]
    assert "fedpax/experiments/fedavg_images.py" in names and "fedpax/py.typed" in names
    assert wheel.stat().st_size < 1.5e6


@pytest.mark.slow
def test_the_wheel_runs_what_a_user_runs_first(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "first.py").write_text(
        re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    )
    # In front of the checkout, which an editable installation has on the path.
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "JAX_PLATFORMS": "cpu"}

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    path = run("-c", "import fedpax; print(fedpax.__file__)")
    assert Path(path.strip()).is_relative_to(tmp_path / "installed")
    run("first.py")
    assert "fedavg_digits" in run("-m", "fedpax", "list")
    train = ("--exp=fedavg_digits", "--job_log_dir=runs/first", "--training.rounds=2")
    run("-m", "fedpax", "train", *train)
    assert (tmp_path / "runs" / "first" / "metrics.jsonl").is_file()
    assert "jax" in run("-m", "fedpax", "doctor")
