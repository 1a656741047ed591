"""Eight simulated CPU devices, and the meshes and the data that the tests share."""

import gc
import itertools
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from each_value import mark_repeated_values
from fast_compilation import keep_programs, share_compiled_programs, share_lowering_contexts
from first_failure import FirstFailure, deal_core
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh
from numpy.typing import NDArray
from test_layers import HEIGHT

from fedpax.data import Source, load
from fedpax.main import main
from fedpax.parallel.compiler_options import simulate_devices

# A shell's background processes ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any test can start a backend; the variable is for the processes that tests start.
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
simulate_devices(8)
jax.devices()  # starts the backend: a command in a test would simulate only the devices it needs

# Tests compile anew, and leave the user's cache of compiled programs alone.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"
jax.config.update("jax_enable_compilation_cache", False)

# Tracing allocates many small objects. By default they are collected after every 700th.
gc.set_threshold(100_000, 20)

# Datasets are prepared anew, in one folder for all workers, and by the code under test.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _data_dir = tempfile.TemporaryDirectory(prefix="fedpax-tests-")
    os.environ["TFDS_DATA_DIR"] = _data_dir.name

# JAX compiles at the first example, so a deadline would measure the compiler.
hypothesis.settings.register_profile("fedpax", deadline=None, max_examples=20)
hypothesis.settings.register_profile(
    "ci", hypothesis.settings.get_profile("fedpax"), derandomize=True, print_blob=True
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "fedpax")

TESTS = Path(__file__).parent
SLOW_FILE = "\npytestmark = pytest.mark.slow\n"
MEMORY_MAPS = Path("/proc/self/maps")  # about 16 for each compiled program
_ended_tests = itertools.count(1)

AXIS_TYPES = {
    "automatic": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@pytest.hookimpl(trylast=True)  # after pytest has made its reporter
def pytest_configure(config: pytest.Config) -> None:
    """Share compiled programs, and print the first failure at once."""
    config.addinivalue_line(
        "markers",
        "each_value: of the products of its parameters, the fast tests run the fewest cases in "
        "which each value occurs",
    )
    is_worker = hasattr(config, "workerinput")  # of xdist: another process reports
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and not is_worker:
        config.pluginmanager.register(FirstFailure(reporter), "first_failure")
    # Of the fast tests, lowering would spend a sixth of the time on the dialects of a new MLIR
    # context for each program, and compilation a third of it on programs that another thread,
    # test, worker or run has compiled. `make test-all` lowers and compiles as users do.
    if jax.config.values["jax_disable_most_optimizations"]:
        share_lowering_contexts()
        kept = keep_programs(getattr(config, "cache", None))
        share_compiled_programs(kept)
        if kept is not None and not is_worker:
            kept.forget()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have only slow tests, unless these run: importing them takes time."""
    is_file = collection_path.suffix == ".py" and config.option.markexpr == "not slow"
    if is_file and SLOW_FILE in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the lowest layers first: what breaks them breaks most other tests too."""
    mark_repeated_values(items)
    rooms = {path: path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    heights = [HEIGHT.get(rooms.get(item.path, ""), math.inf) for item in items]  # or a docstring's
    tests = [(item.path, height) for item, height in zip(items, heights, strict=True)]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    items[:] = [items[index] for index in deal_core(tests, HEIGHT["primitives"], workers)]


def pytest_collection_finish() -> None:
    """Exclude what the imports made from later collections of garbage."""
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """Free the compiled programs of past tests before they reach Linux's 65,530 memory maps."""
    if next(_ended_tests) % 10 == 0 and MEMORY_MAPS.exists():
        with MEMORY_MAPS.open("rb") as maps:
            if sum(1 for _ in maps) > 45_000:
                jax.clear_caches()


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Compile without optimizations, where compilation takes most of the tests' time."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def clients_fsdp() -> Callable[[str], Mesh]:
    """Make the 4 x 2 mesh (clients, fsdp) with "automatic", "explicit" or "mixed" axes."""

    def make(axis_types: str = "automatic") -> Mesh:
        return jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=AXIS_TYPES[axis_types])

    return make


@pytest.fixture(params=[None, *AXIS_TYPES])
def any_mesh(request: pytest.FixtureRequest, clients_fsdp: Callable[[str], Mesh]) -> Mesh | None:
    """Run a test on no mesh and on the 4 x 2 mesh (clients, fsdp) with each kind of axes."""
    return request.param and clients_fsdp(request.param)


@dataclass(frozen=True)
class SliceDevice:
    """The attributes of a TPU device in one of several slices."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


@pytest.fixture(scope="session")
def tpu_devices() -> Callable[..., list[jax.Device]]:
    """Return devices such as "v5e:2x2" in a number of slices; skip where libtpu is missing."""
    pytest.importorskip("libtpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

    def devices(name: str, slices: int = 1) -> list[jax.Device]:
        options: dict[str, object] = {} if slices == 1 else {"num_slices": slices}
        if name.startswith("v4"):
            options["chip_config_name"] = "megacore"  # a chip's two cores as one device
        return topologies.get_topology_desc(name, "tpu", **options).devices

    return devices


@pytest.fixture
def two_slices() -> Callable[[int, int], Mesh]:
    """Make the mesh of the recorded text: (islands, fsdp) over two TPU slices of 4 devices."""

    def make(islands: int, fsdp: int) -> Mesh:
        devices = [
            SliceDevice(100000 * (i // 4 + 1) + i % 4, i // 4, (i % 2, i // 2 % 2, 0))
            for i in range(8)
        ]
        return Mesh(
            np.array(devices).reshape(islands, fsdp),
            ("islands", "fsdp"),
            axis_types=(AxisType.Auto, AxisType.Auto),
        )

    return make


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; return its status, output and errors."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setenv("XLA_FLAGS", "")  # restored after the test

    def call(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data_dir")


@pytest.fixture(scope="session")
def text(data_dir: Path) -> Callable[[str], Source]:
    """Return a function that opens a split of the standard library's text."""
    return lambda split: load("stdlib_text", split, data_dir=data_dir)


@pytest.fixture(scope="session")
def digits(data_dir: Path) -> Callable[[str], Source]:
    """Return a function that opens a split of the digits."""
    return lambda split: load("digits", split, data_dir=data_dir)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def documents(rng: np.random.Generator) -> list[dict[str, bytes]]:
    """Make twenty texts of random letters, of 0 to 99 bytes."""
    lengths: NDArray[np.int64] = rng.integers(0, 100, 20)
    lengths[3] = 0
    return [{"text": rng.integers(97, 123, n).astype(np.uint8).tobytes()} for n in lengths]
