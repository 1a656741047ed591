"""Experiments of a user: how they are found, and how their mistakes are reported."""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedpax
import fedpax.data
import fedpax.experiments
from fedpax.commands.parts.options import configure
from fedpax.experiments.catalog import ExperimentGroup, experiments, find_experiment
from fedpax.experiments.listing import EXPERIMENTS, GROUPS, Entry
from fedpax.training.experiment import Experiment

Run = Callable[..., tuple[int, str, str]]


MODULE = '''
from fedpax.training.experiment import Experiment, Run
from fedpax.training.training_config import TrainingConfig
import dataclasses
from os import getcwd

@dataclasses.dataclass(frozen=True)
class Small(Experiment):
    def build(self) -> Run:
        raise NotImplementedError

def {name}() -> Small:
    """First line about {name}.

    More lines.
    """
    return Small(training=TrainingConfig(rounds=1, evaluate_every=1, checkpoint_every=1))

def {name}_variant() -> Experiment:
    return {name}()

def _hidden() -> Small:
    return {name}()

def helper() -> int:
    return 1

def with_argument(rounds: int) -> Small:
    return {name}()
'''


@pytest.mark.parametrize(
    "statement",
    ["raise ValueError('mine')", "import a_package_that_is_not_here"],
)
def test_errors_in_the_code_of_a_user_keep_their_traceback(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = MODULE.format(name="mine").replace("raise NotImplementedError", statement)
    name = f"faulty_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises((ValueError, ImportError)):
        run("train", f"--exp={name}:mine", f"--job_log_dir={tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "algorithm=single, cohorts=rounds",
            "loss_fn returned an array float32[], expected a pair (loss, metrics)",
        ),
        (
            "algorithm=named, cohorts=rounds",
            "loss_fn returned a metric 'name' of a str, expected a scalar",
        ),
        (
            "evaluate=lambda params: None",
            "Run.evaluate returns a NoneType, expected a dict of metrics",
        ),
        ("mesh=self.mesh.make()", "make_mesh(clients=-1, fsdp=-1): only one axis can take"),
        ("algorithm=fedavg", "Run.algorithm is a function without init, round, expected an object"),
        (
            "cohorts=iter([])",
            "Run.cohorts is a list_iterator without get_state, set_state, expected an object with "
            "__next__, get_state, set_state. Use fedpax.data.FunctionRounds. The state is",
        ),
        ("items_per_round=0", "Run.items_per_round=0, expected a positive number. Give the tokens"),
        (None, "Mine.build returns a NoneType, expected a fedpax.training.experiment.Run"),
    ],
)
def test_mistakes_in_an_own_experiment_are_told_in_words(
    run: Run, tmp_path: Path, statement: str | None, words: str
) -> None:
    sys.path.append(os.getcwd())  # for small_regression; restored by the fixture
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        OWN.format(run=statement and f"super().build()._replace({statement})")
    )
    status, output, errors = run(
        "train", f"--exp={tmp_path / name}.py:own", f"--job_log_dir={tmp_path / 'run'}"
    )
    assert (status, output) == (2, "") and "Traceback" not in errors
    assert errors.splitlines()[-1].startswith(f"fedpax: {words}")


OWN = """
import dataclasses, optax
from fedpax import Cohort
from fedpax.algorithms import fedavg
from fedpax.parallel.mesh import MeshConfig
from small_regression import RandomRounds, Regression, regression

class Rounds(RandomRounds):
    def __next__(self):
        return Cohort(super().__next__())

def loss(params, batch):
    return ((batch["x"] @ params["hidden"] @ params["out"] - batch["y"]) ** 2).mean()

def algorithm(loss_fn):
    return fedavg(loss_fn, cohort_size=1, client_optimizer=optax.sgd(0.01))

rounds = Rounds((1, 2, 8), features=16, seed=0)
single = algorithm(loss)
named = algorithm(lambda params, batch: (loss(params, batch), {{"name": "text"}}))

class Mine(Regression):
    def build(self):
        return {run}

def own():
    training = dataclasses.replace(regression().training, rounds=1)
    mesh = MeshConfig(clients=-1, fsdp=-1) if "mesh" in "{run}" else MeshConfig()
    return Mine(training=training, mesh=mesh, clients=1)
"""


def test_an_experiment_whose_class_is_no_dataclass_is_refused(run: Run, tmp_path: Path) -> None:
    source = MODULE.format(name="own").replace("    def build", "    depth: int = 3\n    def build")
    name = f"plain_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source.replace("@dataclasses.dataclass(frozen=True)", ""))
    status, _, errors = run("train", f"--exp={tmp_path / name}.py:own", "--job_log_dir=x")
    assert status == 2 and f"fedpax: {name}:Small declares depth and is not a dataclass" in errors
    assert "Write @dataclasses.dataclass(frozen=True, kw_only=True) above the class." in errors


def test_the_listing_has_each_experiment_and_group_with_its_summary(run: Run) -> None:
    listed = {**EXPERIMENTS, **GROUPS}
    there = {}
    for info in pkgutil.iter_modules(fedpax.experiments.__path__):
        if info.ispkg or info.name == "catalog":
            continue
        module = importlib.import_module(f"fedpax.experiments.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith("_")
            if not is_own or inspect.signature(function).parameters:
                continue
            returned = inspect.get_annotations(function, eval_str=True).get("return")
            if isinstance(returned, type) and issubclass(returned, Experiment | ExperimentGroup):
                there[name] = Entry(info.name, inspect.getdoc(function).partition("\n")[0])
    assert listed == there
    status, output, _ = run("list")
    width = max(map(len, listed))
    for name, entry in EXPERIMENTS.items():
        assert f"{name.ljust(width)}  {entry.summary}" in output.splitlines()
    assert status == 0 and find_experiment("fedbuff_digits").__module__.endswith("fedbuff_images")
    status, _, errors = run("train", "--exp=fedbuf_digits", "--job_log_dir=x")
    assert status == 2 and "Did you mean fedbuff_digits" in errors


def test_an_error_inside_the_experiments_module_is_not_hidden(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        find_experiment("needs_more:x")


def test_an_experiment_in_a_file_is_found_from_any_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file can import its neighbours, as a script can; its run resumes from another folder."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "code" / f"base_{name}.py").write_text(MODULE.format(name="base"))
    (tmp_path / "code" / f"{name}.py").write_text(
        f"from base_{name} import Small, base\ndef linear() -> Small:\n    return base()\n"
    )
    monkeypatch.chdir(tmp_path / "code")
    function = find_experiment(f"./{name}.py:linear")
    assert function().training.rounds == 1
    monkeypatch.chdir(tmp_path / "elsewhere")
    for path in (f"../code/{name}.py", tmp_path / "code" / f"{name}.py"):
        assert find_experiment(f"{path}:linear") is function
    for missing in (f"../{name}.py", f"./{name}.py"):
        status, _, errors = run("train", f"--exp={missing}:linear", "--job_log_dir=x")
        assert status == 2 and "there is no file" in errors
    status, _, errors = run("train", f"--exp=../code/{name}.py:nope", "--job_log_dir=x")
    words = "has no function 'nope'. Use one of its functions: linear."
    assert status == 2 and words in errors


@pytest.mark.parametrize("name", ["json.py", "two.dots.py"])
def test_a_file_with_the_name_of_another_module_is_refused(
    run: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("def linear(): ...")
    status, _, errors = run("train", f"--exp={tmp_path / name}:linear", "--job_log_dir=x")
    assert status == 2 and "Rename the file" in errors


def test_the_experiments_that_come_with_fedpax_can_be_configured(run: Run) -> None:
    status, output, _ = run("list")
    assert status == 0 and len(output.splitlines()) == len(experiments()) + len(GROUPS)
    for name, function in experiments().items():
        assert configure(name, []) == function()


def test_an_edited_experiment_and_the_modules_beside_it_are_imported_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit in the same second with the same length, as in a notebook, counts too."""
    monkeypatch.chdir(tmp_path)
    name = f"edited_{tmp_path.name}"
    package = tmp_path / f"parts_{name}"
    package.mkdir()
    (package / "__init__.py").touch()
    base, late = tmp_path / f"base_{name}.py", package / "late.py"
    file = tmp_path / f"{name}.py"

    def write(path: Path, rounds: int) -> None:
        before = path.stat().st_mtime_ns if path.exists() else None
        path.write_text(f"ROUNDS = {rounds}\n")
        if before is not None:
            os.utime(path, ns=(before, before))

    def rounds(exp: str) -> tuple[int, ...]:
        status, _, errors = run("train", f"--exp={exp}:own", "--help")
        assert status == 0, errors
        training = find_experiment(f"{exp}:own")().training
        return training.rounds, training.spike_limit, training.seed

    source = MODULE.format(name="own").replace(
        "import dataclasses",
        f"import dataclasses\nfrom base_{name} import ROUNDS as BASE\nROUNDS = 1",
    )
    source = source.replace(
        "return Small(training=TrainingConfig(rounds=1,",
        f"from parts_{name} import late\n    "
        "return Small(training=TrainingConfig(rounds=ROUNDS, seed=late.ROUNDS, spike_limit=BASE,",
    )
    file.write_text(source)
    write(base, 1), write(late, 1)
    exps = (f"./{name}.py", name)
    for exp in exps:
        assert rounds(exp) == (1, 1, 1)
    function = find_experiment(f"{name}:own")
    assert find_experiment(f"./{name}.py:own") is function
    for number, exp in enumerate(exps, start=2):
        write(base, number), write(late, number)
        assert rounds(exp) == (number - 1, number, number)
        file.write_text(source.replace("\nROUNDS = 1", f"\nROUNDS = {number}"))
        assert rounds(exp) == (number, number, number)


def test_a_module_that_was_imported_before_and_edited_is_imported_again(
    run: Run, tmp_path: Path
) -> None:
    name = f"before_{tmp_path.name}"
    file = tmp_path / f"{name}.py"
    file.write_text(MODULE.format(name="own"))
    sys.path.append(str(tmp_path))  # restored by the fixture
    importlib.import_module(name)
    file.write_text(MODULE.format(name="own").replace("rounds=1,", "rounds=2,"))
    assert find_experiment(f"{file}:own")().training.rounds == 2
    file.write_text("def own(:")
    with pytest.raises(SyntaxError):
        find_experiment(f"{file}:own")
    file.write_text(MODULE.format(name="own").replace("rounds=1,", "rounds=3,"))
    assert find_experiment(f"{file}:own")().training.rounds == 3
