"""A round with fedpax, and with pfl and Flower, which need their own environments.

    python -m fedpax.experiments.benchmarks.other_frameworks --model=cnn --clients=64 \
        --pfl_python=environments/pfl/bin/python --flower_python=environments/flower/bin/python

pfl needs PyTorch, Flower needs Ray and PyTorch; a library without the option is left out. All run
the same round (5 steps of plain SGD per client, updates weighted by numbers of examples) and must
give the same result. Each library has its own process, and calls are interleaved. fedpax and pfl
use a GPU if there is one, Flower the CPU.

`--method=scaffold` is option II, in pfl with one worker.
"""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import fedpax
from fedpax.experiments.benchmarks import harness, timing
from fedpax.experiments.benchmarks.fedavg_round import check_equal, fedpax_round
from fedpax.experiments.benchmarks.harness import Row, command, option
from fedpax.experiments.benchmarks.workloads import (
    BATCH_SIZE,
    LEARNING_RATE,
    LOCAL_STEPS,
    WORKLOADS,
    Sizes,
    Workload,
    method,
)

SCRIPT = Path(__file__).parent / "torch_rounds.py"
METHODS = {  # and the libraries that have them
    "fedavg": ("pfl", "flower"),
    "fedprox": ("pfl", "flower"),
    "scaffold": ("pfl",),
}
MU = 0.1  # FedProx's


def _python(library: str) -> Any:
    return option(None, f"Python interpreter of an environment with {library}")


class OtherFrameworks(Sizes):
    model: str = option("cnn", "the clients' model", choices=WORKLOADS)
    clients: list[int] = option("64", "numbers of clients in the round", harness.integers)
    devices: list[int] = option(
        "2", "numbers of devices, simulated on a CPU; for pfl and Flower, workers", harness.integers
    )
    pfl_python: str | None = _python("pfl")
    flower_python: str | None = _python("Flower")
    method: str = option("fedavg", "the method to run", choices=METHODS)
    repetitions: int = option(3, "timed rounds of each library")
    columns = (
        "devices {devices} | clients {clients:9,} | library {library:7} | median s {seconds:.3f} "
        "| fedpax/this {fedpax_ratio:.3f} | versions {versions}"
    )

    @property
    def pythons(self) -> dict[str, str]:
        paths = {library: getattr(self, f"{library}_python") for library in METHODS["fedavg"]}
        return {library: path for library, path in paths.items() if path}

    def __post_init__(self) -> None:
        super().__post_init__()
        for library in self.pythons:
            if library not in METHODS[self.method]:
                libraries = " and ".join(METHODS[self.method])
                raise ValueError(
                    f"--method={self.method} is for {libraries}: leave --{library}_python out"
                )

    def measure_size(self, workload: Workload, mesh: Mesh, clients: int) -> list[Row]:
        devices = mesh.size
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(timing.new_folder())
            params, batches, ones = workload.random_arguments(clients, mesh)
            num_examples = jnp.full_like(ones, LOCAL_STEPS * BATCH_SIZE)
            saved: dict[str, Any] = {**by_name(params), **batches, "rate": LEARNING_RATE, "mu": MU}
            np.savez(folder / "arguments.npz", **saved)
            problem = self.method, workload, params, batches, num_examples
            calls: dict[str, Callable[[], Any]] = {"fedpax": make_call(*problem)}
            # Compared in full precision: GPUs round the operands of matmuls.
            with jax.default_matmul_precision("float32"):
                results = {"fedpax": by_name(make_call(*problem)())}
            versions = {"fedpax": f"jax {jax.__version__}"}
            for library, python in self.pythons.items():
                paths = folder / "arguments.npz", folder / f"{library}.npz"
                line = command_of(library, python, devices, *paths, self.method)
                calls[library] = stack.enter_context(rounds_of(line, devices))
                calls[library]()
                results[library] = dict(np.load(paths[1]))
                versions[library] = str(results[library].pop("versions"))
            check_equal(results)
            seconds = timing.interleaved(calls, (), self.repetitions)
        return [
            Row(
                library=library,
                versions=versions[library],
                seconds=seconds[library],
                fedpax_ratio=timing.paired_ratio(seconds["fedpax"], seconds[library]),
            )
            for library in calls
        ]


def by_name(params: Any) -> dict[str, Any]:
    """Return parameters as NumPy arrays by layer and kind, such as `dense_0/kernel`."""
    leaves = jax.tree.leaves_with_path(params)
    names = (jax.tree_util.keystr(path[-2:], simple=True, separator="/") for path, _ in leaves)
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def make_call(
    name: str, workload: Workload, params: Any, batches: Any, num_examples: Any
) -> Callable[[], Any]:
    """Compile a method; return a function that runs one more round and returns the parameters."""
    clients = len(num_examples)
    if name == "fedavg":
        fedavg = fedpax_round(workload.local_train, clients, "auto")
        return timing.compile_for(fedavg, params, batches, num_examples).call
    algorithm = method(
        name,
        workload.loss_fn,
        cohort_size=clients,
        num_clients=clients,
        client_optimizer=optax.sgd(LEARNING_RATE),
        mu=MU,
        chunk_size=1,
    )
    cohort = fedpax.Cohort(batches, num_examples, client_ids=jnp.arange(clients))
    state = algorithm.init(params)
    run = timing.compile_for(algorithm.round, state, cohort, repeats=True).call
    return lambda: run()[0].params


def command_of(
    library: str, python: str, devices: int, arguments: Path, result: Path, method: str = "fedavg"
) -> list[str]:
    """Return the command that runs a library's rounds."""
    script = [str(SCRIPT), library, str(arguments), str(result), method]
    if library == "flower":
        return [python, *script, str(devices)]
    # pfl keeps SCAFFOLD's controls in one process, whose threads use all cores.
    workers = 1 if method == "scaffold" else devices
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    return [python, *launch, *script]


@contextlib.contextmanager
def rounds_of(command: Sequence[str], devices: int) -> Iterator[Callable[[], None]]:
    """Start a library's process, and yield a function that runs a round in it.

    A line of its input requests a round, which it answers with the line `done`.
    """
    # Settings of this process's Python and JAX do not apply to other environments.
    prefixes = ("PYTHON", "JAX_", "XLA_", "PJRT_NPROC", "NPROC")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(prefixes)
    }
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    environment["PYTHONSAFEPATH"] = "1"  # modules in the scripts' folder must not be imported
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        requests, answers = process.stdin, process.stdout
        assert requests is not None and answers is not None

        def run_round() -> None:
            with contextlib.suppress(BrokenPipeError):
                requests.write("\n")
                requests.flush()
            if not any(line == "done\n" for line in answers):
                raise ChildProcessError(f"{command} exited. Its error message is printed above.")

        yield run_round


main = command(OtherFrameworks)
