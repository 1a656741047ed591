"""Extras: every optional import is known, and a missing package is one sentence with its remedy."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedpax.data
from fedpax.errors import MissingPackageError
from fedpax.extras import EXTRAS, check_installed, describe_missing, is_installed
from fedpax.main import main

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {module for extra in EXTRAS.values() for module in extra.modules}
# Of the others, libraries import what they find in sys.modules.
OPTIONAL = MODULES - {m for name in ("bench", "docs", "peers") for m in EXTRAS[name].modules}
# Copied to devices: it runs without fedpax.
STANDALONE = "fedpax/deploy/iree_client.py"
# Packages of the core that come with others of it: jax brings numpy and scipy, orbax etils.
INDIRECT = {"etils", "fsspec", "jaxlib", "ml_dtypes", "scipy", "tensorstore"}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, which expressions have none of."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


def imported_modules() -> Iterator[tuple[str, str]]:
    """Yield each file of the wheel with the first part of each module that it imports."""
    for top in ("fedpax", "algorithms", "experiments"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if "benchmarks" in path.parts or path == ROOT / STANDALONE:
                continue
            for node in statements(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                for name in names:
                    yield path.relative_to(ROOT).as_posix(), name.partition(".")[0]


def test_every_import_is_of_the_core_or_of_an_extra() -> None:
    core = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    modules = {file.parts[0].partition(".")[0] for name in core for file in files(name) or ()}
    unknown = {
        (path, name)
        for path, name in imported_modules()
        if name not in {"fedpax", *sys.stdlib_module_names, *MODULES, *INDIRECT, *modules}
    }
    assert not unknown
    assert not core & {canonicalize_name(extra.package) for extra in EXTRAS.values()}


def test_every_extra_names_what_it_installs() -> None:
    for name, extra in EXTRAS.items():
        wanted = map(Requirement, PROJECT["optional-dependencies"][name])
        installed = {canonicalize_name(requirement.name) for requirement in wanted}
        assert installed & {canonicalize_name(extra.package), "jax"}, name


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the packages of all extras, and forget the modules of fedpax that need them."""
    for name in list(sys.modules):
        if name.partition(".")[0] in OPTIONAL:
            monkeypatch.setitem(sys.modules, name, None)
        if name.startswith(("fedpax.user_files", "fedpax.pictures", "fedpax.planning.draw_mesh")):
            monkeypatch.delitem(sys.modules, name)
    for name in OPTIONAL:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("x,client\n1,2\n")
    Path("a.array_record").touch()
    Path("picture").mkdir()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("command", "use", "package", "extra"),
    [
        ("data a.csv", "Reading 'a.csv'", "pyarrow", "files"),
        ("prepare a.csv --out=b --client=client", "Reading 'a.csv'", "pyarrow", "files"),
        ("data a.csv --picture=a.png", "--picture=a.png", "matplotlib", "plot"),
        ("show --job_log_dir=. --picture=a.png", "--picture=a.png", "matplotlib", "plot"),
        (
            "evaluate --job_log_dir=. --by_client --picture=a.png",
            "--picture=a.png",
            "matplotlib",
            "plot",
        ),
        ("partition --exp=fedavg_digits --picture=a.png", "--picture=a.png", "matplotlib", "plot"),
        (
            "plan --exp=fedavg_digits --topology=cpu:8 --picture=a.png",
            "--picture=a.png",
            "matplotlib",
            "plot",
        ),
        (
            "certificates --out=c --names=a,b",
            "`fedpax certificates`",
            "cryptography",
            "sites",
        ),
        (
            "train --exp=fedavg_digits --job_log_dir=a --training.tracker=trackio",
            "--training.tracker=trackio",
            "trackio",
            "trackio",
        ),
        (
            "partition --exp=fedavg_digits --dataset=mnist",
            "The data set 'mnist'",
            "tensorflow_datasets",
            "tfds",
        ),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    command: str, use: str, package: str, extra: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(command.split()) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == (
        f"fedpax: {use} needs the package {package}, which is not installed. Run: pip install "
        f"'fedpax[{extra}]'\n"
    )


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: fedpax.data.load("a.csv"), r"Reading 'a.csv' .*fedpax\[files\]"),
        (lambda: fedpax.data.load("a.array_record"), r"Reading .* grain, .*fedpax\[tfds\]"),
        (lambda: fedpax.data.plot_partition([[0], [1]], None, "a.png"), r"fedpax\[plot\]"),
        (lambda: check_installed("mlflow", "A run"), r"A run needs .*fedpax\[mlflow\]"),
    ],
)
def test_python_names_the_extra_too(use: Callable[[], object], words: str) -> None:
    with pytest.raises(MissingPackageError, match=words):
        use()
    assert not is_installed("matplotlib")


# Modules of the extras cannot be imported, nor found: as in an installation without them.
BARE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {modules!r} else found(name, *rest)
"""


def run_bare(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "tests")}
    hidden = BARE.format(modules=MODULES - {"fsspec"} | {"sklearn"})
    return subprocess.run(
        [sys.executable, "-c", hidden + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_faces_and_all_commands_can_be_imported_without_extras(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil
import fedpax, fedpax.experiments.catalog
from fedpax.commands import COMMANDS
for name in fedpax.__all__:
    getattr(fedpax, name)
for module in pkgutil.iter_modules(fedpax.__path__):
    if module.ispkg:
        face = importlib.import_module(f"fedpax.{module.name}")
        for name in getattr(face, "__all__", ()):
            getattr(face, name)
for command in COMMANDS.values():
    importlib.import_module(command.place.partition(":")[0])
"""
    result = run_bare(code, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_first_experiments_train_without_extras(tmp_path: Path) -> None:
    tiny = " ".join(
        f"--model.{field}"
        for field in ("num_layers=1", "embed_dim=24", "num_heads=2", "num_kv_heads=1", "mlp_dim=52")
    )
    commands = [
        "list",
        "train --exp=fedavg_digits --job_log_dir=a --training.rounds=2",
        f"train --exp=diloco_text --job_log_dir=b --training.rounds=1 --data.seq_len=16 {tiny}",
        "train --exp=fedavg_synthetic --job_log_dir=c --training.rounds=2",
        "show --job_log_dir=a,c",
        "evaluate --job_log_dir=a",
        "export --job_log_dir=a --out=a.npz",
        "partition --exp=fedavg_digits",
        "compare --exp=fedavg_digits,fedavg_synthetic --job_log_dir=d --training.rounds=1",
        "doctor",
    ]
    code = f"""
import os
from fedpax.main import main
for command in {commands!r}:
    pid = os.fork()
    if pid == 0:
        status = main(command.split())
        sys.stdout.flush()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, command
"""
    result = run_bare(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "A picture of the comparison needs the package matplotlib" in result.stderr
    assert re.search(r"See \S*comparison\.json\.", result.stdout)
    assert (tmp_path / "d" / "comparison.json").is_file()


def test_the_extra_of_a_missing_package_is_named() -> None:
    text = "--picture needs the package matplotlib, which is not installed. Run: pip install"
    assert describe_missing("matplotlib", "--picture") == f"{text} 'fedpax[plot]'"
