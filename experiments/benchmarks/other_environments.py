"""A FedAvg round with fedpax and with libraries that cannot be installed beside it: pfl, FedJAX.

    python -m fedpax.experiments.benchmarks.other_environments --model=cnn --clients=64 \
        --pfl_python=environments/pfl/bin/python --fedjax_python=environments/fedjax/bin/python

pfl needs PyTorch, and FedJAX runs only on jax < 0.4.39, so each comes with the Python of its own
environment, and is left out without. All get the same data and parameters, take the same round
(5 steps of plain SGD a client, changes weighted by numbers of examples) and must give the same
result. Then they take turns: each waits in a process of its own until it is asked for a round.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax.experiments.benchmarks.fedavg_round import check_equal
from fedpax.experiments.benchmarks.rounds import fedpax_round
from fedpax.experiments.benchmarks.timing import (
    compile_for,
    interleaved,
    on_devices,
    paired_ratio,
    write,
)
from fedpax.experiments.benchmarks.workloads import (
    BATCH,
    LEARNING_RATE,
    LOCAL_STEPS,
    WORKLOADS,
)

SCRIPTS = {"pfl": "pfl_round.py", "fedjax": "fedjax_round.py"}


class Row(NamedTuple):
    """The round with one library.

    Attributes:
        model: what the clients train.
        devices: how many there are; pfl has as many workers.
        clients: how many clients train.
        library: which takes the round.
        versions: its own, and its framework's.
        seconds: of each round.
        fedpax_ratio: seconds of fedpax's round over this one's, paired.
    """

    model: str
    devices: int
    clients: int
    library: str
    versions: str
    seconds: list[float]
    fedpax_ratio: float


def measure(
    model: str, devices: int, clients: int, pythons: dict[str, str], repetitions: int
) -> list[Row]:
    """Checks that the libraries agree, and times them in turn.

    Args:
        model: a name in `WORKLOADS`.
        devices: how many of `jax.devices()` fedpax uses.
        clients: how many clients train.
        pythons: for names in `SCRIPTS`, the interpreter that has the library.
        repetitions: how often each round is timed.

    Returns:
        A row for each library, fedpax's first.

    Raises:
        AssertionError: two libraries differ in their results.
        ChildProcessError: a library's process ended.
    """
    workload = WORKLOADS[model]()
    mesh = fedpax.make_mesh(devices=jax.devices()[:devices], clients=devices)
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.ExitStack() as processes,
        jax.set_mesh(mesh),
    ):
        folder = Path(name)
        params, batches, ones = workload.draw(clients, mesh)
        num_examples = jnp.full_like(ones, LOCAL_STEPS * BATCH)
        np.savez(folder / "arguments.npz", **by_name(params), **batches, rate=LEARNING_RATE)
        arguments = (params, batches, num_examples)
        call = compile_for(fedpax_round(workload.local_train, clients, "auto"), *arguments).call
        results = {"fedpax": by_name(call(*arguments))}
        calls: dict[str, Callable[[], Any]] = {"fedpax": lambda: call(*arguments)}
        versions = {"fedpax": f"jax {jax.__version__}"}
        for library, python in pythons.items():
            result = folder / f"{library}.npz"
            command = command_of(library, python, devices, folder / "arguments.npz", result)
            calls[library] = processes.enter_context(rounds_of(command, devices))
            calls[library]()
            results[library] = dict(np.load(result))
            versions[library] = str(results[library].pop("versions"))
        check_equal(results)
        seconds = interleaved(calls, (), repetitions)
    return [
        Row(
            model,
            devices,
            clients,
            library,
            versions[library],
            seconds[library],
            paired_ratio(seconds["fedpax"], seconds[library]),
        )
        for library in calls
    ]


def by_name(params: Any) -> dict[str, Any]:
    """Names each array by its layer and what it is there, such as `dense_0/kernel`."""
    leaves = jax.tree.leaves_with_path(params)
    names = (jax.tree_util.keystr(path[-2:], simple=True, separator="/") for path, _ in leaves)
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def command_of(library: str, python: str, devices: int, arguments: Path, result: Path) -> list[str]:
    """The command that takes a library's rounds: reads arguments, and writes the first result."""
    launch = []
    if library == "pfl":
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={devices}"]
    script = Path(__file__).parent / SCRIPTS[library]
    return [python, *launch, *map(str, (script, arguments, result))]


@contextlib.contextmanager
def rounds_of(command: Sequence[str], devices: int) -> Iterator[Callable[[], None]]:
    """Starts a process, and gives the function that has it take a round and waits for its end.

    A line on its standard input asks for a round, the line `done` on its output answers; the end
    of the input ends it.

    Args:
        command: of the process.
        devices: how many devices a CPU shows to JAX there.

    Yields:
        The function.
    """
    # What is set for this process's Python and JAX is not meant for theirs.
    ours = ("PYTHON", "JAX_", "XLA_", "PJRT_NPROC", "NPROC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    environment["PYTHONSAFEPATH"] = "1"  # the scripts import nothing that lies beside them
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None and answers is not None

        def take_round() -> None:
            with contextlib.suppress(BrokenPipeError):
                requests.write("\n")
                requests.flush()
            if not any(line == "done\n" for line in answers):
                raise ChildProcessError(f"{command} ended: its own message stands above.")

        yield take_round


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as the arguments say, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=WORKLOADS, default="cnn")
    parser.add_argument("--clients", default="64", help="sizes of the cohort")
    parser.add_argument("--devices", default="2", help="how many; a CPU simulates them")
    for library in SCRIPTS:
        parser.add_argument(f"--{library}_python", help=f"the interpreter that has {library}")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="a file for the figures, else printed")
    options = parser.parse_args(argv)
    paths = {library: getattr(options, f"{library}_python") for library in SCRIPTS}
    pythons = {library: path for library, path in paths.items() if path}
    print("devices   clients  library  median s  fedpax/this  with")
    rows: list[Row] = []
    for devices in map(int, options.devices.split(",")):
        for clients in map(int, options.clients.split(",")):
            sizes = (options.model, devices, clients)
            for row in on_devices(devices, measure, *sizes, pythons, options.repetitions):
                print(
                    f"{row.devices:7} {row.clients:9,}  {row.library:7}  "
                    f"{statistics.median(row.seconds):8.3f}  {row.fedpax_ratio:11.3f}  "
                    f"{row.versions}",
                    flush=True,
                )
                rows.append(row)
    write(options.json, rows, **vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
