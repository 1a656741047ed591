"""The wheel, in a folder of its own: what a user runs first works without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import venv
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
    assert "fedpax/experiments/__init__.pyi" in names and "fedpax/sites/__init__.pyi" in names
    assert wheel.stat().st_size < 1.5e6


def run_first_commands(python: Path, folder: Path, **variables: str) -> None:
    """Run what a user runs first, in a folder without the checkout."""
    (folder / "first.py").write_text(
        re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables

    def run(*arguments: str) -> str:
        result = subprocess.run(
            [python, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    path = run("-c", "import fedpax; print(fedpax.__file__)")
    assert Path(path.strip()).is_relative_to(folder / "installed")
    run("first.py")
    assert "fedavg_digits" in run("-m", "fedpax", "list")
    train = ("--exp=fedavg_digits", "--job_log_dir=runs/first", "--training.rounds=2")
    run("-m", "fedpax", "train", *train)
    assert (folder / "runs" / "first" / "metrics.jsonl").is_file()
    assert "No problems found." in run("-m", "fedpax", "doctor")


@pytest.mark.slow
def test_the_wheel_runs_what_a_user_runs_first(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    # In front of the checkout, which an editable installation has on the path.
    run_first_commands(Path(sys.executable), tmp_path, PYTHONPATH=os.fspath(tmp_path / "installed"))


@pytest.mark.slow
def test_the_wheel_installs_into_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """The core alone, at most 800 MB: JAX with NumPy and SciPy has 600 of them."""
    installed = tmp_path / "installed"
    venv.create(installed)
    python = installed / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    try:
        result = subprocess.run(
            [*install, *constraints, wheel], capture_output=True, text=True, timeout=900
        )
        if result.returncode and "No matching distribution" in result.stderr:
            pytest.skip("no package index can be reached")
        assert result.returncode == 0, result.stderr
        size = sum(p.lstat().st_size for p in installed.rglob("*") if p.is_file())
        assert size < 800e6
        run_first_commands(python, tmp_path)
    finally:
        shutil.rmtree(installed)  # pytest keeps the folders of three runs
