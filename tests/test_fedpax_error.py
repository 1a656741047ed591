"""Tests of the errors that fedpax raises, and of how the command line tells them from bugs."""

import ast
import pickle
from pathlib import Path

import pytest

import fedpax
from fedpax.checkpoints.checkpoint import LostCheckpointDirError
from fedpax.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingFieldError,
    MissingPackageError,
)
from fedpax.main import main
from fedpax.transport.calls import DisconnectedError

ROOT = Path(__file__).parent.parent
# Errors of fedpax are subclasses of these, so that callers who catch these catch them too.
REPLACED = {"ValueError", "TypeError", "ImportError"}
# They are copied to devices, and import nothing else of fedpax.
ALONE = {ROOT / "fedpax/deploy" / name for name in ("iree_client.py", "encoded_values.py")}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ArgumentError, ValueError),
        (ArgumentTypeError, TypeError),
        (MissingFieldError, KeyError),
        (MissingPackageError, ImportError),
        (DisconnectedError, ConnectionError),
        (LostCheckpointDirError, OSError),
    ],
)
def test_an_error_is_that_of_fedpax_and_the_builtin_one(
    error: type[fedpax.FedpaxError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin) as caught:
        raise error("words")
    assert isinstance(caught.value, fedpax.FedpaxError) and str(caught.value) == "words"
    assert str(pickle.loads(pickle.dumps(caught.value))) == "words"


def test_fedpax_raises_its_own_errors() -> None:
    paths = [path for name in ("fedpax", "algorithms") for path in (ROOT / name).rglob("*.py")]
    paths += (ROOT / "experiments").glob("*.py")
    assert len(paths) > 200
    raised = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        if path not in ALONE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if isinstance(node.exc.func, ast.Name) and node.exc.func.id in REPLACED
    ]
    assert not raised, f"raise an error of fedpax.errors in {', '.join(raised)}"


@pytest.mark.parametrize(
    ("raised", "status"),
    [(ArgumentTypeError("words"), 2), (MissingPackageError("words"), 2), (OSError("words"), 2)],
)
def test_the_command_line_prints_an_error_of_fedpax(
    raised: Exception,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A frame of this test would be code of the user.
    source = "def run(arguments):\n    raise error"
    namespace = {"error": raised, "__name__": "fedpax.stub"}
    exec(source, namespace)
    monkeypatch.setattr("fedpax.main._run", namespace["run"])
    assert main(["list"]) == status
    assert capsys.readouterr().err == "fedpax: words\n"


@pytest.mark.parametrize("raised", [TypeError("bug"), ValueError("bug"), ImportError("bug")])
def test_the_command_line_keeps_the_traceback_of_a_bug(
    raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = {"error": raised, "__name__": "fedpax.stub"}
    exec("def run(arguments):\n    raise error", namespace)
    monkeypatch.setattr("fedpax.main._run", namespace["run"])
    with pytest.raises(type(raised), match="bug"):
        main(["list"])
