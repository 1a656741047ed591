"""Commands, settings and data that are refused: a message without a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest

import fedpax
import fedpax.data
import fedpax.experiments
from fedpax.commands.command_table import COMMANDS

REGRESSION = "small_regression:regression"

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "no command 'trian'. Did you mean train?"),
        (["--exp=x"], "no command '--exp=x'"),
        (["train"], "`fedpax train` has no --exp, expected --exp=NAME"),
        (["train", "some_name"], "`fedpax train` has no --exp, expected --exp=NAME"),
        (["train", "--exp"], "Missing value for flag --exp"),
        (["train", "--exp=x", "--multihost=perhaps"], "multihost"),
        (["show", "--job_logdir=runs"], "FILE.png alone. Did you mean --job_log_dir?"),
        (["show", "--steps=3"], "NAME and --picture=FILE.png alone. Leave it out."),
        (["certificates", "--outs=x"], "--authority. Did you mean --out? Run"),
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
        (["data", "x.csv", "--columns=a", "--columns=b"], "--columns is given 2 times, expected"),
        (["prepare", "x.csv", "--types", "a=string", "--types=b=int8"], "commas: --types=A,B."),
        (["compare", "--exp=a,b", "--seeds=1", "--seeds=2"], "--seeds is given 2 times"),
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
            "diloco_text --mesh.islands=4",
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
    assert list(tmp_path.iterdir()) == []  # so another configuration can use the folder


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
    ("override", "words"),
    [
        ("--model.hiden=4", ["--model.hiden", "Perhaps you meant", "--model.hidden INT"]),
        ("--job_logdir=x", ["Did you mean --job_log_dir?"]),
        ("--model.hiden=a/long/path/*.csv", ["fedpax: Did you mean --model.hidden?"]),
        ("--learning_rat=4", ["Perhaps you meant", "--learning_rate FLOAT"]),
        ("--model.hidden=many", ["--model.hidden", "'many'"]),
        (
            "--training.rounds=0",
            ["rounds=0: expected an int of at least 1", "Set --training.rounds"],
        ),
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


@pytest.mark.parametrize("override", ["--mesh=4", "--training=3"])
def test_a_group_of_fields_in_place_of_a_field_is_named(run: Run, override: str) -> None:
    status, _, errors = run("train", "--exp=diloco_text", "--job_log_dir=x", override)
    name = override.partition("=")[0]
    assert status == 2 and f"{name} is a " in errors
    assert ", set in the code of the experiment. Set one of its fields, such as --" in errors


def test_a_field_of_several_values_is_set_once(run: Run, tmp_path: Path) -> None:
    train = ["train", "--exp=fedavg_table", f"--job_log_dir={tmp_path}", "--data.label=y"]
    twice = ["--data.columns", "age=number", "--data.files=x.csv", "--data.columns=zip=left_out"]
    status, _, errors = run(*train, *twice)
    assert status == 2
    assert "--data.columns is given 2 times, expected once. Set all its values at once" in errors


def test_the_last_of_two_numbers_counts(run: Run, tmp_path: Path) -> None:
    train = ["train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}"]
    status, _, output = run(*train, "--training.rounds=0", "--training.rounds=1")
    assert (status, "round 1" in output) == (0, True)


def test_a_chosen_method_is_not_named_as_a_group(run: Run) -> None:
    choice = ("--method=fedprox", "--method.nu=0.1")
    status, output, errors = run("train", "--exp=fedavg_digits", "--job_log_dir=x", *choice)
    assert status == 2 and "--method.nu" in output + errors
    assert "set in the code" not in errors


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--method.option=II", "--method.option is not a setting of fedavg. Set also --method=sc"),
        (
            "--aggregator.num_neighbors=2",
            "of mean. Set also --aggregator=private_secure_mean or secure_mean.",
        ),
    ],
)
def test_a_setting_of_another_function_names_it(run: Run, setting: str, words: str) -> None:
    status, _, errors = run("train", "--exp=fedavg_digits", "--job_log_dir=x", setting)
    assert status == 2 and words in errors


@pytest.mark.parametrize(
    "command", [name for name, entry in COMMANDS.items() if "exp" in entry.fields_of]
)
def test_an_unknown_field_names_the_help_of_its_command(run: Run, command: str) -> None:
    words = [command, *["--flower"] * (command == "export"), "--exp=fedavg_digits"]
    if command != "export" and "job_log_dir" in COMMANDS[command].flags:
        words.append("--job_log_dir=x")
    status, output, errors = run(*words, "--unknown=3")
    text = " ".join((output + errors).replace("│", " ").split())
    assert status == 2 and f"run fedpax {' '.join(words)} --help".replace("=x", "=DIR") in text
    status, output, _ = run(*words, "--help")
    assert status == 0 and "--training.rounds" in output


def test_multihost_without_processes_names_the_variables_to_set(run: Run, tmp_path: Path) -> None:
    status, _, errors = run(
        "train", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", "--multihost"
    )
    assert status == 2 and "JAX_COORDINATOR_ADDRESS=HOST:PORT" in errors
    status, _, errors = run(
        "compare", f"--exp={REGRESSION}", f"--job_log_dir={tmp_path}", "--multihost"
    )
    assert status == 2 and "multihost" in errors
