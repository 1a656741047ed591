"""The types of the installed package, as a user's type checker sees them."""

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = Path(__file__).parent / "user_script.py"
# Each line is an error, and would be none if the types of fedpax were unknown.
WRONG_LINES = """\
step(w)
step(w, x, sale=2.0)
step.with_options(clients=2)(w, x).params
state.parms
metrics["loss"].losses
fedavg(loss_fn, cohort=4)
fedpax.federated_men(x)
""".splitlines()
OPTAX_HAS_NO_TYPES = "[mypy]\nstrict = True\n[mypy-optax]\nignore_missing_imports = True\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of an installation, because pip writes beside them."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("fedpax", "algorithms", "experiments", ".src"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_the_script_of_a_user_runs() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # mypy reads JAX, twice
@pytest.mark.parametrize("how", [[], ["--editable"]], ids=["installed", "editable"])
def test_type_checkers_accept_the_script_of_a_user(
    sources: Path, how: list[str], tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    known = {path for path in sys.path if "site-packages" in path}
    (packages / "others.pth").write_text("\n".join([sysconfig.get_path("purelib"), *known]))
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", *how, str(sources)]
    subprocess.run(
        [sys.executable, "-m", "pip", f"--python={python}", *install], check=True, timeout=120
    )
    (tmp_path / "mypy.ini").write_text(OPTAX_HAS_NO_TYPES)
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    text = SCRIPT.read_text()
    right.write_text(text)
    wrong.write_text(text + "\n".join(WRONG_LINES) + "\n")
    first = len(text.splitlines()) + 1
    expected = set(range(first, first + len(WRONG_LINES)))
    for command in (
        ["mypy", f"--python-executable={python}"],
        ["pyright", f"--pythonpath={python}"],
    ):

        def check(file: Path, command: list[str] = command) -> tuple[int, str]:
            result = subprocess.run(
                [sys.executable, "-m", *command, file.name],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            return result.returncode, result.stdout + result.stderr

        status, output = check(right)
        assert status == 0, output
        _, output = check(wrong)
        lines = {int(line) for line in re.findall(r"wrong\.py:(\d+):.* error: ", output)}
        assert lines == expected, output
