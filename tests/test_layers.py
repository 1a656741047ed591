"""The layering of the house: a module imports from its own layer and those below, and no other.

Read from the source, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first; layers of one height do not import each other. "fedpax" is the package's own
# __init__.py, which gathers the public names of the layers below it.
HEIGHT = {
    "errors": 0,
    "lazy_names": 0,
    "extras": 1,
    "chips": 1,
    "checks": 1,
    "secure_sums": 2,
    "primitives": 2,
    "transforms": 3,
    "hlo": 3,
    "inspect": 4,
    "parallel": 4,
    "processes": 4,
    "ops": 5,
    "aggregators": 5,
    "clients": 5,
    "algorithm": 6,
    "fedpax": 7,
    "sources": 8,
    "transport": 8,
    "text": 9,
    "populations": 9,
    "user_files": 10,
    "models": 11,
    "simulation": 11,
    "run_files": 11,
    "data": 11,
    "checkpoints": 12,
    "elastic": 13,
    "algorithms": 14,
    "training": 14,
    "planning": 15,
    "settings": 15,
    "sites": 16,
    "deploy": 16,
    "islands": 17,
    "reports": 18,
    "experiments": 18,
    "commands": 19,
    "main": 20,
    "__main__": 21,
}
# What these layers may import besides the standard library and fedpax.
LIBRARIES = {
    "errors": set(),
    "checks": {"jax"},
    "primitives": {"jax", "numpy"},
    "aggregators": {"jax", "jaxtyping", "chex", "optax", "dp_accounting"},
    "algorithm": {"jax", "jaxtyping", "optax", "typing_extensions"},
    "algorithms": {"jax", "jaxtyping", "chex", "optax"},
    "transport": {"numpy", "ml_dtypes", "grpc", "cryptography"},
}
# What algorithms may import of fedpax: the layers below that concern a method, and the contract.
ALGORITHMS_SEE = (
    "fedpax.algorithms",
    "fedpax.primitives",
    "fedpax.aggregators",
    "fedpax.checks",
    "fedpax.clients",
    "fedpax.errors",
    "fedpax.federated_",
    "fedpax.transforms.program",
    "fedpax.Cohort",
    "fedpax.algorithm",
)
# Public names that are of a layer above, imported on first use.
FROM_ABOVE = {
    ("fedpax", "fedpax.commands.train_object.train"),
    ("fedpax.sites", "fedpax.islands"),  # deprecated names
    ("fedpax.sites", "fedpax.islands.*"),
}
# The one module that may touch what JAX does not promise to keep.
UNSTABLE, KEEPER = ("jax.extend", "jax.interpreters", "jaxlib"), "fedpax.primitives._jax"
# Attributes of equations and primitives of the same kind.
UNSTABLE_ATTRIBUTES = {"ctx", "get_bind_params"}
# The one module that changes a function of JAX, so that the fast tests take less time.
FAST_COMPILATION = "tests.fast_compilation"


parsed = functools.lru_cache(maxsize=1)(ast.parse)  # by several checks, one after another


def module_name(path: Path) -> str:
    """algorithms/__init__.py -> fedpax.algorithms; fedpax/data/load.py -> the same, dotted."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("algorithms", "experiments"):
        parts = ("fedpax", *parts)
    return ".".join(parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all that is imported, or reached as jax.a.b or fedpax.a.b.

    A string with the name of a module counts, as `import_module` takes it, with or without
    "fedpax.", and one of a dispatch table, "fedpax.module:function". An f-string counts as the part
    before its first brace and "*".
    """
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(level=0):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            case ast.ImportFrom():
                yield node.lineno, "." * node.level + (node.module or "")
            case ast.Attribute() if root_of(node) in ("jax", "fedpax"):
                yield node.lineno, ast.unparse(node)
            case ast.Constant(value=str(text)) if re.fullmatch(r"fedpax(\.\w+)+(:\w+)?", text):
                yield node.lineno, text
            case ast.Constant(value=str(text)) if "." in text and f"fedpax.{text}" in modules():
                yield node.lineno, f"fedpax.{text}"
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]) if re.fullmatch(
                r"fedpax\.(\w+\.)*", text
            ):
                yield node.lineno, f"{text}*"
            case _:
                nodes.extend(ast.iter_child_nodes(node))


@functools.cache
def modules() -> frozenset[str]:
    """Return the names of the modules of fedpax."""
    return frozenset(map(module_name, python_files("fedpax", "algorithms", "experiments")))


def root_of(node: ast.expr) -> str | None:
    """jax.lax.scan -> jax; None where the first of the names is no name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def is_within(name: str, *packages: str) -> bool:
    """Tell if a dotted name is one of the packages, or inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def layer_of(name: str) -> str:
    """fedpax.data.rounds -> data; fedpax.federated_map -> fedpax."""
    part = name.split(".")[1] if "." in name else "fedpax"
    return part if part in HEIGHT else "fedpax"


def complaint(module: str, name: str) -> str | None:
    """Says why `module` may not import `name`, or None where it may."""
    library = name.split(".")[0]
    if name.startswith("."):
        return "a relative import: write fedpax. in full"
    if library in ("algorithms", "experiments"):
        return f"import it as fedpax.{library}"
    if is_within(name, "jax._src") and module != FAST_COMPILATION:
        return "private to JAX"
    if not is_within(module, "fedpax"):
        return None  # tests see every layer
    if is_within(name, *UNSTABLE) and module != KEEPER:
        return f"only {KEEPER} touches what JAX does not promise to keep"
    layer = layer_of(module)
    if library != "fedpax":
        allowed = LIBRARIES.get(layer, {library}) | sys.stdlib_module_names
        return None if library in allowed else f"{layer} may not import this library"
    if layer == "algorithms" and name != "fedpax" and not name.startswith(ALGORITHMS_SEE):
        return "algorithms see primitives, aggregators, clients, optax and the contract alone"
    if (module, name) in FROM_ABOVE:
        return None
    if name == "fedpax.*":
        return "name the module in full"
    imported = layer_of(name)
    if layer != imported and HEIGHT[layer] <= HEIGHT[imported]:
        return f"{imported} does not lie below {layer}"
    return None


def complaints(source: str, module: str) -> list[str]:
    """All that is wrong with the imports of a module, a line each."""
    return [
        f"{module}, line {line}: {name}: {text}"
        for line, name in imports(parsed(source))
        if (text := complaint(module, name))
    ]


def unstable_attributes(source: str, module: str) -> list[str]:
    """All attributes that only the module of JAX's unstable parts may read, a line each."""
    if module == KEEPER or not is_within(module, "fedpax"):
        return []
    if not any(f".{name}" in source for name in UNSTABLE_ATTRIBUTES):
        return []
    return [
        f"{module}, line {node.lineno}: .{node.attr}: only {KEEPER} reads it"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and node.attr in UNSTABLE_ATTRIBUTES
    ]


def find_circle(sources: dict[str, str]) -> list[str]:
    """Find modules that import each other in a circle.

    Args:
        sources: source text by module name. Imports inside functions and under TYPE_CHECKING count.

    Returns:
        Modules of which each imports the next, and the first again at the end; empty if there is
        no circle.
    """

    def imported(module: str) -> set[str]:
        collected = set()
        for _, name in imports(parsed(sources[module])):
            if ":" in name or "*" in name or (module, name) in FROM_ABOVE:
                continue  # imported when it is used: a command, or a name from above
            while name and name not in sources:  # a name in a module, not a module
                name = name.rpartition(".")[0]
            collected.add(name)
        return collected - {""}

    graph = {module: sorted(imported(module)) for module in sources}
    done: set[str] = set()

    def visit(chain: list[str]) -> list[str]:
        for name in graph[chain[-1]]:
            if name in chain:
                return [*chain[chain.index(name) :], name]
            if name not in done and (circle := visit([*chain, name])):
                return circle
        done.add(chain[-1])
        return []

    return next((circle for module in sorted(graph) if (circle := visit([module]))), [])


def python_files(*folders: str) -> list[Path]:
    """Return the Python files in folders of the repository."""
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def source_of(path: Path) -> str:
    """Return the text of a file, with the names that its stub imports on first use."""
    stub = path.with_suffix(".pyi")
    names = stub.read_text() if stub.exists() else ""
    # All packages are attributes of `fedpax`.
    return path.read_text() + re.sub("^from fedpax import .*", "", names, flags=re.MULTILINE)


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = python_files("fedpax", "algorithms", "experiments")
    circle = find_circle({module_name(path): source_of(path) for path in paths})
    assert not circle, " imports ".join(circle)


@pytest.mark.parametrize(
    "source",
    [
        "from fedpax.a import x",
        "import fedpax.a.x",
        "from fedpax import a",
        "def f():\n  from fedpax.a import x",
        "import_module('fedpax.a')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from fedpax.a import x",
    ],
)
def test_a_circle_is_found(source: str) -> None:
    sources = {"fedpax.a": "import fedpax.b", "fedpax.b": "from fedpax.c import y"}
    circle = ["fedpax.a", "fedpax.b", "fedpax.c", "fedpax.a"]
    assert find_circle(sources | {"fedpax.c": source}) == circle
    assert find_circle(sources | {"fedpax.c": "import jax"}) == []


def missing_modules(source: str, modules: dict[str, str]) -> list[str]:
    """Return the modules of fedpax that a source imports and that do not exist.

    Args:
        source: the text of a module.
        modules: the text of each package's `__init__`, and "" for each other module, by name.
    """
    found = [
        (node.module, alias.name)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ImportFrom) and node.module and is_within(node.module, "fedpax")
        for alias in node.names
    ]
    return [
        f"{module}.{name}"
        for module, name in found
        if module not in modules
        or (
            modules[module]
            and f"{module}.{name}" not in modules
            and not re.search(rf"\b{name}\b", modules[module])
        )
    ]


def test_tests_and_benchmarks_import_modules_that_exist() -> None:
    """No fast test imports the files of slow ones."""
    paths = python_files("fedpax", "algorithms", "experiments")
    modules = {module_name(p): source_of(p) if p.stem == "__init__" else "" for p in paths}
    missing = {
        str(path.relative_to(ROOT)): names
        for path in python_files("tests", "experiments")
        if (names := missing_modules(path.read_text(), modules))
    }
    assert not missing


def test_a_missing_module_is_found() -> None:
    modules = {"fedpax.a": "def f(): ...", "fedpax.a.b": ""}
    source = "def g():\n  from fedpax.a import b, c, f\nfrom fedpax.d import e\nimport fedpax.a"
    assert missing_modules(source, modules) == ["fedpax.d.e", "fedpax.a.c"]
    assert missing_modules("from fedpax.a.b import x", modules) == []


def test_the_architecture_page_names_what_exists() -> None:
    """The folders of its layers, and the places of its additions."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:\w+/)*\w+(?:/|\.py|\.toml))`", page)
    assert len(named) > 40
    folders = ("fedpax", "algorithms", "experiments", "tests", "docs")
    paths = [path for folder in folders for path in ROOT.joinpath(folder).rglob("*")]
    existing = {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}
    existing |= {f"/{folder}" for folder in folders}
    missing = [n for n in named if not any(e.endswith(f"/{n.rstrip('/')}") for e in existing)]
    assert not missing


def test_every_module_keeps_to_its_layer() -> None:
    paths = python_files("fedpax", "algorithms", "experiments", "tests")
    names = {module_name(path) for path in paths}
    assert {"fedpax", "fedpax.primitives", "fedpax.algorithms", "fedpax.experiments"} <= names
    assert {layer_of(name) for name in names if is_within(name, "fedpax")} <= set(HEIGHT)
    result = [
        text
        for path in paths
        for check in (complaints, unstable_attributes)
        for text in check(source_of(path), module_name(path))
    ]
    assert not result, "\n".join(result)


def test_an_unstable_attribute_is_found() -> None:
    source = "with eqn.ctx.manager:\n    eqn.primitive.get_bind_params(params)"
    assert len(unstable_attributes(source, "fedpax.primitives.map")) == 2
    assert unstable_attributes(source, KEEPER) == unstable_attributes(source, "tests.x") == []


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("fedpax.primitives.map", "import optax", "may not import this library"),
        ("fedpax.primitives.map", "import fedpax", "does not lie below"),
        (
            "fedpax.primitives.map",
            "from fedpax.parallel.mesh import make_mesh",
            "does not lie below",
        ),
        (
            "fedpax.primitives.map",
            "from jax.extend.core import Primitive",
            "only fedpax.primitives._jax",
        ),
        ("fedpax.primitives.map", "from jax.interpreters import ad", "only fedpax.primitives._jax"),
        ("fedpax.primitives.map", "import jax\njax.interpreters.ad.jvp", "line 2"),
        ("fedpax.primitives.map", "import_module('fedpax.inspect.cost')", "does not lie below"),
        ("fedpax.data.rounds", "TABLE = {'train': 'fedpax.commands.train:train'}", "line 1"),
        ("fedpax.data.rounds", "TABLE = {'x': 'experiments.catalog'}", "does not lie below"),
        ("fedpax.data.rounds", "f'fedpax.{name}'", "name the module in full"),
        ("fedpax.data.rounds", "f'fedpax.experiments.{name}'", "does not lie below"),
        ("fedpax.primitives._jax", "from jax._src import core", "private to JAX"),
        ("tests.conftest", "from jax._src import core", "private to JAX"),
        (
            "fedpax.parallel.axes",
            "def f():\n  from fedpax.models import classifiers",
            "does not lie below",
        ),
        ("fedpax", "from fedpax.data import text", "does not lie below"),
        ("fedpax.data.rounds", "import fedpax.models", "models does not lie below data"),
        ("fedpax.models.classifiers", "from fedpax import data", "data does not lie below models"),
        (
            "fedpax.training.trainer",
            "from fedpax.algorithms.fedavg import fedavg",
            "does not lie below",
        ),
        (
            "fedpax.training.trainer",
            "from algorithms import fedavg",
            "import it as fedpax.algorithms",
        ),
        (
            "fedpax.algorithms.fedavg",
            "from fedpax.training.trainer import train",
            "the contract alone",
        ),
        (
            "fedpax.algorithms.fedavg",
            "import fedpax\nfedpax.models.classifiers",
            "the contract alone",
        ),
        ("fedpax.algorithms.fedavg", "import fedpax\nfedpax.make_mesh()", "the contract alone"),
        ("fedpax.algorithms.fedavg", "from flax import nnx", "may not import this library"),
        ("fedpax.algorithms.fedavg", "from . import diloco", "a relative import"),
        ("fedpax.deploy.beam", "from fedpax.experiments import x", "does not lie below"),
        ("fedpax.experiments.x", "import fedpax.main", "does not lie below"),
        ("tests.test_x", "import experiments.x", "import it as fedpax.experiments"),
    ],
)
def test_a_breach_is_found(module: str, source: str, words: str) -> None:
    assert words in "\n".join(complaints(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fedpax.primitives._jax", "from jax.extend import core\nfrom jax.interpreters import ad"),
        ("fedpax.primitives.map", "import functools\nimport jax.numpy as jnp"),
        ("fedpax", "from fedpax.parallel.mesh import make_mesh"),
        ("fedpax.data.rounds", "import grain\nimport fedpax\nfedpax.program"),
        ("fedpax.algorithms.fedavg", "import fedpax\nimport optax\nfedpax.federated_mean"),
        ("fedpax.algorithms.fedavg", "from fedpax.algorithm import FederatedAlgorithm"),
        ("fedpax.data.rounds", "f'fedpax.data.{name}, fedpax.{name}(', 'a.b', 'models'"),
        ("fedpax.main", "from fedpax.experiments import x\nfrom fedpax.deploy import beam"),
        ("tests.test_x", "from jax.extend import core\nimport fedpax.main"),
    ],
)
def test_what_the_layers_allow_is_allowed(module: str, source: str) -> None:
    assert complaints(source, module) == []


def layers_of_the_page(page: str) -> list[set[str]]:
    """Return the layers of the page of the architecture, highest first."""
    layers: list[set[str]] = []
    for row in re.findall(r"^\|.*", page.split("## Layers")[1].split("\n## ")[0], re.MULTILINE)[2:]:
        _, layer, folders, *_ = row.split("|")
        if layer.strip():
            layers.append(set())
        names = re.findall(r"`(\w+)(?:/|\.py)`", folders)
        layers[-1] |= {layer_of(f"fedpax.{name}") for name in names}
    return layers


def breaches_of_order(layers: list[set[str]]) -> list[str]:
    """Return pairs of layers that are on the page in another order than in `HEIGHT`."""
    ordered = [room for layer in layers for room in sorted(layer)]
    split = [str(sorted(x)) for x in layers if len({HEIGHT[room] for room in x}) > 1]
    return split + [
        f"{a} is above {b}" for a, b in itertools.pairwise(ordered) if HEIGHT[a] < HEIGHT[b]
    ]


def test_the_page_of_the_architecture_has_the_layers_in_order() -> None:
    layers = layers_of_the_page((ROOT / "docs/architecture.md").read_text("utf-8"))
    assert breaches_of_order(layers) == []
    assert set().union(*layers) == HEIGHT.keys() - {"__main__"}


def test_every_folder_has_a_height() -> None:
    """A folder without one would count as the package's own `__init__.py`."""
    folders = {path.parent.name for path in (ROOT / "fedpax").glob("*/__init__.py")}
    assert len(folders) > 20 and folders <= HEIGHT.keys()


@pytest.mark.parametrize(
    ("rows", "breach"),
    [
        ("| a | `data/` | |\n| | `ops/`, `clients/` | |", "['clients', 'data', 'ops']"),
        ("| a | `extras.py` | |\n| b | `ops/` | |", "extras is above ops"),
        ("| a | `data/` | |\n| b | `ops/` | |\n| | `clients/` | |", None),
    ],
)
def test_a_layer_out_of_order_is_found(rows: str, breach: str | None) -> None:
    page = f"## Layers\n\n| layer | folder |\n|---|---|\n{rows}\n\n## Next\n| c | `main.py` |"
    assert breaches_of_order(layers_of_the_page(page))[:1] == ([breach] if breach else [])


def test_the_top_level_has_no_other_files() -> None:
    command = ["git", "-C", str(ROOT), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("the sources are not a git checkout")
    tops = {path.split("/")[0] for path in listed.stdout.splitlines()}
    folders = {"fedpax", "algorithms", "experiments", "tests", "docs"}
    files = {"README.md", "LICENSE", "MANIFEST.in", "Makefile", "pyproject.toml"}
    files |= {"constraints.txt", "constraints-beam.txt"}
    assert {name for name in tops if not name.startswith(".")} == folders | files
