import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import fedpax
import fedpax.data
import fedpax.experiments
from fedpax.__main__ import main as program
from fedpax.commands.options import configure
from fedpax.experiments.catalog import entries, experiments, find_experiment
from fedpax.main import main
from fedpax.training.configuration import read_configuration
from fedpax.training.metrics import read_metrics

ROOT = Path(__file__).parent.parent

HERE = Path(__file__).parent
REGRESSION = "small_regression:regression"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Run:
    """Run a command in this process; return its status, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(HERE / "training")
    monkeypatch.setenv("XLA_FLAGS", "")  # restored after the test

    def call(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return call


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the experiments that come with fedpax by the modules of a folder."""
    monkeypatch.setattr(fedpax.experiments, "__path__", [str(tmp_path)])
    before = set(sys.modules)
    entries.cache_clear()
    yield tmp_path
    entries.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("fedpax.experiments."):
            del sys.modules[name]


MODULE = '''
from fedpax.training.experiment import Experiment, Run, TrainingConfig
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


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], ["train", "--help"]])
def test_help_is_printed(run: Run, arguments: list[str]) -> None:
    status, output, errors = run(*arguments)
    assert (status, errors) == (0, "")
    for words in (
        "fedpax train --exp=NAME",
        "fedpax compare",
        "fedpax list",
        "--allow_config_change",
    ):
        assert words in output


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, f"fedpax {fedpax.__version__}\n", "")


def test_imports_are_light() -> None:
    """Bound the imports of a start: they decide how long `fedpax list` takes."""
    code = """
import sys
import fedpax
for name in fedpax.__all__:
    getattr(fedpax, name)
heavy = {
    "flax", "grain", "matplotlib", "optax", "orbax.checkpoint", "pandas", "scipy.stats",
    "sklearn", "tensorboardX", "tensorflow_datasets", "tqdm", "tyro",
}
print(sorted(heavy & sys.modules.keys()))
from fedpax.main import main
main(["list"])
print(sorted(heavy & sys.modules.keys() - {"flax", "optax", "tyro"}))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = process.stdout.splitlines()
    assert (lines[0], lines[-1], process.stderr) == ("[]", "[]", "")


@pytest.mark.parametrize(
    ("stderr_is_a_terminal", "no_color", "colors"),
    [(True, "", True), (True, "1", False), (False, "", False)],
)
def test_colors_are_for_terminals(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    stderr_is_a_terminal: bool,
    no_color: str,
    colors: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: stderr_is_a_terminal)
    status, output, errors = run("train", f"--exp={REGRESSION}", "--job_log_dir=x", "--nope=1")
    assert status == 2 and ("\x1b[" in output + errors) == colors
    assert os.environ["TERM"] == "xterm"


def test_no_arguments_show_the_help_as_an_error(run: Run) -> None:
    status, output, errors = run()
    assert (status, output) == (2, "") and "fedpax train --exp=NAME" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "no command 'trian'. Did you mean train?"),
        (["--exp=x"], "no command '--exp=x'"),
        (["train"], "`fedpax train` has no --exp, expected --exp=NAME"),
        (["train", "some_name"], "`fedpax train` has no --exp, expected --exp=NAME"),
        (["train", "--exp"], "Missing value for flag --exp"),
        (["train", "--exp=x", "--multihost=perhaps"], "multihost"),
        (["compare"], "`fedpax compare` has no --exp, expected --exp=NAME"),
        (["compare", "--exp=,", "--job_log_dir=x"], "--exp=, names no experiment"),
        (["list", "all"], "got 'all', expected no arguments"),
        (["train", "--exp=small_regression:regresion"], "Did you mean regression?"),
        (["train", "--exp=small_regresion:regression"], "no module small_regresion"),
        (["train", "--exp=nowhere.at_all:x"], "no module nowhere. It must be installed, on"),
        (["train", "--exp=small_regression:RandomRounds.__name__"], "has no function"),
        (["train", "--exp=:regression"], "has no module or no function"),
        (["train", "--exp=small_regression:"], "has no module or no function"),
        (["train", "--exp=small_regression:local_sgd"], "needs loss_fn and clients and"),
        (
            ["train", "--exp=os:getcwd"],
            "returns a str, expected a fedpax.training.experiment.Experiment",
        ),
        (["train", f"--exp={REGRESSION}"], "such as --job_log_dir=runs/regression"),
        (
            ["train", f"--exp={REGRESSION}", "--job_log_dir=runs/x", "--mesh.tensor=1000000"],
            "tensor=1000000 needs 8,000,000 devices, but there are 8 (cpu). Make the mesh smaller",
        ),
        (["compare", f"--exp={REGRESSION},{REGRESSION}", "--job_log_dir=x"], "two experiments"),
        (["train", "--exp=a,b", "--job_log_dir=x"], "names several experiments, expected one"),
    ],
)
def test_commands_that_are_refused(run: Run, arguments: list[str], words: str) -> None:
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("fedpax: ") and words in errors


@pytest.mark.parametrize(
    ("exp", "override", "words"),
    [
        (
            "diloco_text --mesh.fsdp=2",
            "--islands=3",
            "islands=4 does not divide --islands=3. Set --islands to a multiple",
        ),
        ("diloco_text --mesh.fsdp=2", "--data.batch_size=5", "does not divide --data.batch_size=5"),
        ("diloco_text --mesh.fsdp=2", "--data.tokenizer=nowhere.json", "no such file"),
        ("fedavg_digits", "--cohort.size=31", "take 30 or fewer"),
        ("fedavg_digits", "--mesh.clients=3", "--mesh.clients=3 does not divide --cohort.size=10"),
    ],
)
def test_settings_that_do_not_fit_give_a_message_without_a_traceback(
    run: Run, tmp_path: Path, exp: str, override: str, words: str
) -> None:
    arguments = (*f"--exp={exp}".split(), f"--job_log_dir={tmp_path}", override)
    status, _, errors = run("train", *arguments)
    assert status == 2
    assert errors.startswith("fedpax: ") and words in errors and "Traceback" not in errors
    assert not (tmp_path / "config.json").exists()  # so another configuration can use the folder


def test_a_folder_that_cannot_be_created_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _, errors = run("train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path / 'file'}")
    assert status == 2 and "cannot hold a run (File exists)" in errors


@pytest.mark.parametrize("in_memory", [True, False])
def test_damaged_data_give_a_message_without_a_traceback(
    run: Run, tmp_path: Path, in_memory: bool
) -> None:
    assert len(fedpax.data.load("digits", "train", data_dir=str(tmp_path / "data"))) > 0
    (path,) = (tmp_path / "data").rglob("*train.array_record*")
    damaged = bytearray(path.read_bytes())
    damaged[1000:-3000:1000] = bytes(255 - byte for byte in damaged[1000:-3000:1000])
    path.write_bytes(damaged)
    status, _, errors = run(
        "train",
        "--exp=fedavg_digits",
        f"--job_log_dir={tmp_path / 'run'}",
        f"--data_dir={tmp_path / 'data'}",
        f"--in_memory={in_memory}",
    )
    assert status == 2 and "Traceback" not in errors
    assert errors.startswith("fedpax: ") and "are damaged: delete that folder" in errors


@pytest.mark.parametrize(
    "statement",
    ["raise ValueError('mine')", "MeshConfig(fsdp=0).make()", "import a_package_that_is_not_here"],
)
def test_errors_in_the_code_of_a_user_keep_their_traceback(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = MODULE.format(name="mine").replace("raise NotImplementedError", statement)
    name = f"faulty_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        source.replace(
            "import dataclasses", "import dataclasses\nfrom fedpax.parallel.mesh import MeshConfig"
        )
    )
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
            "Run.cohorts is a list_iterator without get_state, set_state, expected",
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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--model.hiden=4", ["--model.hiden", "Perhaps you meant", "--model.hidden INT"]),
        ("--learning_rat=4", ["Perhaps you meant", "--learning_rate FLOAT"]),
        ("--model.hidden=many", ["--model.hidden", "'many'"]),
        ("--training.rounds=0", ["training.rounds=0 is too small", "Set --training.rounds to 1"]),
    ],
)
def test_fields_that_are_refused(run: Run, tmp_path: Path, override: str, words: list[str]) -> None:
    folder = tmp_path / "run"
    status, output, errors = run(
        "train", f"--exp={REGRESSION}", f"--job_log_dir={folder}", override
    )
    text = " ".join((output + errors).replace("│", " ").split())
    assert status == 2 and all(part in text for part in words)
    assert not folder.exists()


def test_help_of_an_experiment_shows_every_field(run: Run) -> None:
    status, output, _ = run("train", f"--exp={REGRESSION}", "--help")
    assert status == 0
    for words in (
        "Local SGD on 8 clients",
        "--model.hidden INT",
        "width of the hidden layer",
        "--training.checkpoint_every INT",
        "--mesh.clients INT",
        "--learning_rate FLOAT",
    ):
        assert words in output


def test_overrides_reach_nested_fields_in_either_spelling(run: Run) -> None:
    find_experiment(REGRESSION)
    changed = configure(
        REGRESSION,
        ["--model.hidden", "7", "--mesh.clients=-1", "--training.stop_on_non_finite=False"],
    )
    assert (changed.model.hidden, changed.mesh.clients) == (7, -1)
    assert changed.training.stop_on_non_finite is False
    assert changed.model.features == configure(REGRESSION, []).model.features


def test_experiments_are_found_by_their_return_type(package: Path, run: Run) -> None:
    for name in ("first_one", "second_one"):
        (package / f"{name}.py").write_text(MODULE.format(name=name))
    names = {f"{which}_one{rest}" for which in ("first", "second") for rest in ("", "_variant")}
    assert set(experiments()) == names
    status, output, _ = run("list")
    assert status == 0
    assert "first_one           First line about first_one." in output.splitlines()
    assert find_experiment("second_one_variant")().training.rounds == 1
    status, _, errors = run("train", "--exp=frist_one", "--job_log_dir=x")
    assert status == 2 and "Did you mean first_one" in errors


def test_a_name_that_two_modules_use_is_listed_twice(package: Path) -> None:
    for module in ("first", "second"):
        (package / f"{module}.py").write_text(MODULE.format(name="same"))
    assert {"same", "fedpax.experiments.second:same"} <= set(experiments())
    assert find_experiment("fedpax.experiments.second:same").__module__.endswith("second")


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
    assert status == 2 and "has no function 'nope'" in errors


@pytest.mark.parametrize("name", ["json.py", "two.dots.py"])
def test_a_file_with_the_name_of_another_module_is_refused(
    run: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("def linear(): ...")
    status, _, errors = run("train", f"--exp={tmp_path / name}:linear", "--job_log_dir=x")
    assert status == 2 and "Rename the file" in errors


def test_the_experiments_that_come_with_fedpax_can_be_configured(run: Run) -> None:
    status, output, _ = run("list")
    assert status == 0 and len(output.splitlines()) == len(experiments())
    for name, function in experiments().items():
        assert configure(name, []) == function()


def test_ctrl_c_before_the_training_gives_no_traceback(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpax.commands.train.parse_run", interrupted)
    command = ("train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}")
    assert run(*command) == (130, "", "fedpax: SIGINT: stopped without saving.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handled_before_jax_is_imported(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "jax.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    command = [sys.executable, "-m", "fedpax.main", "doctor"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == f"fedpax: {number.name}: stopped; there was nothing to save.\n"


def test_a_closed_pipe_gives_no_traceback() -> None:
    """Close the pipe early, as `fedpax --help | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "fedpax.main", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, "")


def test_closed_streams_give_no_traceback(tmp_path: Path) -> None:
    """Close both streams, as `fedpax --help >&- 2>&-` does; `fedpax` alone prints on stderr."""
    program = f"{sys.executable} -m fedpax"
    opened = (
        "from fedpax.training.console import open_closed_streams; open_closed_streams(); "
        "print(open('x', 'w').fileno())"
    )
    script = f"""
        {program} --help >&-; echo $?
        {program} 2>&-; echo $?
        {program} --help <&- >&- 2>&-; echo $?
        {program} --help >/dev/full; echo $?
        {sys.executable} -c "{opened}" <&- 2>&-
    """
    process = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert process.stdout.split() == ["0", "2", "0", "1", "3"]
    assert process.stderr.splitlines() == [
        "fedpax: the output cannot be written: No space left on device. Make room on the disk, or "
        "write to another one."
    ]


@pytest.mark.parametrize("where", ["__getattr__", "main"])
def test_ctrl_c_before_it_is_handled_gives_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupt(*arguments: str) -> None:
        raise KeyboardInterrupt

    module = types.ModuleType("fedpax.main")
    setattr(module, where, interrupt)
    monkeypatch.setitem(sys.modules, "fedpax.main", module)
    assert program() == 130
    assert capsys.readouterr().err == "fedpax: SIGINT: stopped; there was nothing to save.\n"


def test_the_package_imports_nothing_slow() -> None:
    """Until `fedpax.__main__` runs, Ctrl-C ends in a traceback."""
    # -S: an editable install imports the three before all else.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import fedpax; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not {"jax", "re", "typing"} & {*found.stdout.split()}


def test_a_run_is_trained_resumed_and_refused(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ("train", f"--exp={REGRESSION}", f"--job_log_dir={folder}", "--model.hidden", "6")
    status, output, errors = run(*command, "--training.rounds=4")
    assert status == 0 and f"Finished 4 of 4 rounds in {folder}: held-out loss" in output
    assert "round 4/4: held-out loss" in errors
    name, configuration = read_configuration(folder)
    assert (name, configuration.model.hidden) == (REGRESSION, 6)
    assert configuration == configure(REGRESSION, ["--model.hidden=6", "--training.rounds=4"])

    status, output, _ = run(*command, "--training.rounds=4")
    assert (status, output) == (0, f"Nothing to do: {folder} holds all 4 of 4 rounds.\n")

    status, output, errors = run(*command, "--training.rounds=5", "--learning_rate=0.02")
    assert (status, output) == (2, "")
    assert "learning_rate: 0.01 -> 0.02" in errors
    assert "training.rounds" not in errors  # a finished run takes more rounds
    assert "--allow_config_change=learning_rate" in errors

    status, output, _ = run(
        *command,
        "--training.rounds=5",
        "--learning_rate=0.02",
        "--allow_config_change=learning_rate",
    )
    assert status == 0 and "Finished 5 of 5 rounds" in output
    fewer = ("--training.rounds=3", "--learning_rate=0.01", "--allow_config_change=learning_rate")
    assert run(*command, *fewer)[0] == 2
    status, output, _ = run(*command, *fewer, "--allow_config_change=training")
    held = "holds 5 rounds, more than the 3 of the experiment"
    assert (status, output) == (0, f"Nothing to do: {folder} {held}.\n")

    status, output, errors = run(
        "train", "--exp=small_regression:single_client", f"--job_log_dir={folder}"
    )
    assert (status, output) == (2, "")
    assert f"another experiment, --exp={REGRESSION}" in errors and "hidden" not in errors


def test_a_loss_that_is_not_finite_is_an_error(run: Run, tmp_path: Path) -> None:
    folder = f"--job_log_dir={tmp_path}"
    status, output, errors = run("train", f"--exp={REGRESSION}", folder, "--learning_rate=50")
    assert (status, output) == (1, "")
    assert "stopped: the loss of round" in errors and "smaller learning rate" in errors


@pytest.mark.slow
def test_compare_trains_unfinished_experiments_and_writes_the_files(
    run: Run, tmp_path: Path
) -> None:
    settings = ("--training.rounds=4", "--training.evaluate_every=2")
    folder = f"--job_log_dir={tmp_path / 'regression'}"
    assert run("train", f"--exp={REGRESSION}", folder, *settings)[0] == 0
    before = (tmp_path / "regression" / "metrics.jsonl").read_bytes()

    both = f"--exp={REGRESSION},small_regression:single_client"
    status, output, errors = run("compare", both, f"--job_log_dir={tmp_path}", *settings)
    assert status == 0
    assert "is finished already" in errors
    assert (tmp_path / "regression" / "metrics.jsonl").read_bytes() == before
    assert len(read_metrics(tmp_path / "single_client")) == 1 + 4 + 2
    rows = [line.split("|")[1].strip() for line in output.splitlines() if line.startswith("|")]
    assert rows[0] == "experiment" and rows[2:] == ["regression", "single_client"]
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content[0]["bytes_across_placement"] > 0 == content[1]["bytes_across_placement"]
    assert (tmp_path / "comparison.png").exists()

    status, _, errors = run("compare", both, f"--job_log_dir={tmp_path}", "--training.rounds=4")
    assert status == 2 and "training.evaluate_every: 2 -> 4" in errors
    allow = "--allow_config_change=training.evaluate_every"
    status, _, errors = run(
        "compare", both, f"--job_log_dir={tmp_path}", "--training.rounds=4", allow
    )
    assert status == 0 and errors.count("is finished already") == 2


@pytest.mark.parametrize(
    ("variables", "mesh", "status", "words"),
    [
        ({}, "--mesh.clients=3", 0, "Finished"),
        pytest.param(
            {"JAX_NUM_CPU_DEVICES": "2"},
            "--mesh.clients=3",
            2,
            "needs 6 devices, but there are 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            "--mesh.clients=4",
            2,
            "unset XLA_FLAGS and JAX_NUM_CPU_DEVICES",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_cpu_simulates_the_devices_of_the_mesh(
    tmp_path: Path, variables: dict[str, str], mesh: str, status: int, words: str
) -> None:
    removed = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in removed}
    settings = [f"--job_log_dir={tmp_path}", mesh, "--clients=12", "--training.rounds=1"]
    process = subprocess.run(
        [sys.executable, "-m", "fedpax.main", "train", f"--exp={REGRESSION}", *settings],
        cwd=HERE / "training",
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert process.returncode == status, process.stderr
    assert words in process.stdout + process.stderr


def test_multihost_without_processes_names_the_variables_to_set(run: Run, tmp_path: Path) -> None:
    status, _, errors = run(
        "train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", "--multihost"
    )
    assert status == 2 and "JAX_COORDINATOR_ADDRESS=HOST:PORT" in errors
    status, _, errors = run(
        "compare", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", "--multihost"
    )
    assert status == 2 and "multihost" in errors
