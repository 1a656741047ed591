"""The files of a Flower app: what `flwr run` reads, around a program."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import FederatedAlgorithm
from fedpax.deploy.batch_work import Clients
from fedpax.deploy.round_program import Settings, pack_program
from fedpax.errors import ArgumentError, FedpaxError, MissingPackageError

PACKAGE, APP_FILE = "fedpax_app", "pyproject.toml"
RESULTS = "Results of the last round: "
"""Before the results of a run in its log, as JSON."""
_LARGEST = 9 * 2**20  # Flower refuses apps above 10 MB

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{description}"
license = "Apache-2.0"
# Install fedpax[flower] where the SuperLink and the SuperNodes run. Flower installs what is
# listed here before each run.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedpax"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
rounds = {rounds}  # number of rounds
seed = {seed}  # of the initial parameters
quorum = 0  # the fewest participants that must answer; 0: all {size}
enough = 0  # a round ends once this many have answered; 0: all that were asked
deadline = 0.0  # seconds after which a round ends if the quorum has answered; 0: none
wait = 600.0  # seconds to wait for nodes
secure = false  # mask the terms: the server sees their sum alone
secure-protocol = "fedpax"  # or "secagg+", Flower's own, also in a simulation
secure-bound = 64.0  # the largest absolute value of a term for SecAgg+
out = ""  # folder of the result; "": ~/.fedpax/flower/results/RUN
resume = false  # continue the run in that folder, if there is one
print-results = {print_results}  # write all results of the last round to the log
"""

_SERVER = '''\
"""The server: it asks {size} of {num_clients} {participants} in a round."""

from pathlib import Path

from fedpax.deploy.flower import server_app

app = server_app(Path(__file__).with_name("program.json"))
'''

_CLIENT = '''\
"""A participant. Its data come from data.py, which only the worker of the node imports."""

from pathlib import Path

from fedpax.deploy.flower import client_app

app = client_app(Path(__file__).with_name("program.json"), "{package}.data:load_data")
'''

_DATA = '''\
"""The data of a participant. Edit `load_data` to read data of another kind."""

from pathlib import Path

from fedpax.experiments.node_data import experiment_data


def load_data(node):
    """Return the data of participant `node.participant`.

    In a simulation: client k of the experiment's data. On a node of its own, the files in
    --node-config 'partition-id=0 files="/data/*.csv"'. A dict of arrays [examples, ...] with the
    fields of a batch works too: fedpax draws the batches.
    """
    return experiment_data(Path(__file__).parent, node)
'''

_README = """\
# {name}

{description} In a round, {size} of {num_clients} {participants} take part.

    pip install 'fedpax[flower]'  # where the SuperLink and the SuperNodes run

Simulation:

    flwr run . --stream --federation-config 'num-supernodes={num_clients}'

Real nodes, here without TLS:

    flower-superlink --insecure --disable-runtime-dependency-installation
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 \\
        --node-config 'partition-id=0'
    flwr run . mine --stream

`mine` is a section of `config.toml` in `$FLWR_HOME` (default `~/.flwr`):

    [superlink.mine]
    address = "127.0.0.1:8000"
    insecure = true

Each SuperNode on one machine needs a `--port` and a `partition-id` of its own.
The settings are in `pyproject.toml`; `--run-config 'rounds=3 deadline=60.0 quorum=2'` overrides.
"""


def write_app(
    folder: str | Path,
    *,
    name: str,
    program: str,
    settings: Settings,
    size: int,
    participants: str,
    prints_results: bool = False,
) -> None:
    """Write the files of a Flower app.

    Args:
        folder: a new or an empty folder.
        name: name of the app. Characters that Flower does not take become hyphens.
        program: the text of `program.json`.
        settings: the settings of the program.
        size: number of participants in a round.
        participants: what they are, such as "clients".
        prints_results: whether the server writes all results of the last round to its log.

    Raises:
        ArgumentError: the program is larger than Flower takes.
    """
    if len(program) > _LARGEST:
        raise ArgumentError(
            f"The program has {len(program):,} bytes, and Flower takes apps of at most 10 MB, "
            "expected a program without large constants. Pass arrays as arguments of the round, "
            "not as values that its functions close over."
        )
    folder = Path(folder)
    package = folder / PACKAGE
    package.mkdir(parents=True)
    fields = {
        **settings._asdict(),
        "name": app_name(name),
        "description": f"{_plain(name)}, trained by fedpax.",
        "package": PACKAGE,
        "size": size,
        "participants": _plain(participants),
        "print_results": "true" if prints_results else "false",
    }
    (folder / APP_FILE).write_text(_PYPROJECT.format(**fields), encoding="utf-8")
    (folder / "README.md").write_text(_README.format(**fields), encoding="utf-8")
    (package / "__init__.py").write_text(f'"""{_plain(name)} on Flower."""\n', encoding="utf-8")
    (package / "server_app.py").write_text(_SERVER.format(**fields), encoding="utf-8")
    (package / "client_app.py").write_text(_CLIENT.format(**fields), encoding="utf-8")
    (package / "data.py").write_text(_DATA, encoding="utf-8")
    (package / "program.json").write_text(program, encoding="utf-8")


def app_name(name: str) -> str:
    """Return a name that Flower takes: a letter, then letters, digits and hyphens, at most 32."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-30:].strip("-")
    return words if words[:1].isalpha() else f"a-{words}".rstrip("-")


def _plain(text: str) -> str:
    """Replace the characters that end a text of TOML or Python, or begin an escape."""
    return re.sub(r"[^\w .:/-]", "_", text)


# ---- one round of a program on Flower's nodes, started and awaited by this process

_LEVEL = re.compile(r"[^A-Za-z]*INFO[^A-Za-z]*")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_TAIL = 2000  # characters of Flower's output in an error
_SECONDS_TO_STOP = 30


class FlowerRunError(FedpaxError):
    """A run of Flower without results; the message has the end of its log."""


def run_flower(
    program: Callable[..., Any],
    *args: Any,
    clients: Callable[[], Clients],
    write_data: Callable[[Path], None],
    name: str = "round",
    flags: Sequence[str] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> list[Any]:
    """Run one round of a program on Flower's nodes by `flwr run`; its result is in the log."""
    beside = Path(sys.executable).with_name("flwr")
    command = str(beside) if beside.exists() else shutil.which("flwr")
    if command is None:
        raise MissingPackageError(
            "run_flower() needs the command flwr. Install it in an environment of its own: pip "
            "install 'fedpax[flower]'."
        )
    shapes = clients().shapes
    size = jax.tree.leaves(shapes)[0].shape[0]
    constants = jax.tree.map(jnp.asarray, args)
    algorithm = FederatedAlgorithm(
        lambda params: constants, lambda state, data: (state, program(*state, data))
    )
    settings = Settings(rounds=1, num_clients=size)
    text = pack_program(algorithm, lambda key: (), shapes, settings)
    with tempfile.TemporaryDirectory() as temporary:
        app = Path(temporary) / "app"
        write_app(
            app,
            name=name,
            program=text,
            settings=settings,
            size=size,
            participants="participants",
            prints_results=True,
        )
        write_data(app / PACKAGE)
        results = _read_results([command, "run", str(app), *flags, "--stream"], tell)
    like = jax.eval_shape(program, *constants, shapes)
    leaves = [
        jnp.asarray(np.array(results[jax.tree_util.keystr(path)], leaf.dtype))
        for path, leaf in jax.tree.leaves_with_path(like)
    ]
    return [jax.tree.unflatten(jax.tree.structure(like), leaves)]


def _read_results(command: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run `flwr run APP [SUPERLINK] ...` to its end; return the results in its output."""
    lines: list[str] = []
    results: dict[str, Any] | None = None
    run = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                line = _COLORS.sub("", line)
                before, mark, content = line.partition(RESULTS)
                if mark and _LEVEL.fullmatch(before):  # not the text of a node, in a warning
                    results = json.loads(content)
                    continue
                if not run and (started := _STARTED.search(line)):
                    run = started[1]
                lines.append(line)
                tell(line.rstrip())
        except BaseException:
            process.terminate()
            if run:
                _stop(command, run, tell)
            raise
    if results is None:
        raise FlowerRunError(
            f"{' '.join(command[:2])} ended without results, with status {process.returncode}. Its "
            f"last lines: {''.join(lines)[-_TAIL:].strip()}"
        )
    return results


def _stop(command: Sequence[str], run: str, tell: Callable[[str], None]) -> None:
    """End a run, which would otherwise go on at its SuperLink."""
    superlink = command[3:4] if not command[3].startswith("-") else []
    stop = [command[0], "stop", run, *superlink]
    try:
        ended = subprocess.run(stop, capture_output=True, timeout=_SECONDS_TO_STOP, check=False)
        is_ended = ended.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        is_ended = False
    tell(
        f"Run {run} is ended."
        if is_ended
        else f"Run {run} can still be active. End it: {' '.join(['flwr', *stop[1:]])}"
    )
