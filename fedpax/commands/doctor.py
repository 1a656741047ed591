"""`fedpax doctor`: what is installed, which devices there are, and what is broken.

A broken library must not stop the report.
"""

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import fedpax
from fedpax.extras import EXTRAS

DISTRIBUTION = "fedpax"

# The packages whose versions a report of a defect needs.
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "chex")


class Finding(NamedTuple):
    """A line of the report."""

    name: str
    text: str
    problem: str | None = None  # what is broken and its remedy; None if nothing essential is


def doctor(arguments: Sequence[str]) -> int:
    """Print the report."""
    if arguments:
        from fedpax.errors import UsageError

        raise UsageError(
            f"`fedpax doctor` got {arguments[0]!r}, expected no arguments. Leave it out."
        )
    findings = list(examine())
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name.ljust(width)}  {finding.text}")
    problems = [finding.problem for finding in findings if finding.problem]
    print("\n" + ("\n".join(f"Problem: {text}" for text in problems) or "No problems found."))
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """Yield what was found: versions, devices, folders and extras."""
    yield Finding(DISTRIBUTION, f"{fedpax.__version__} in {Path(fedpax.__file__).resolve().parent}")
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    requirements = _requirements()
    for package in (*PACKAGES, *sorted(requirements.keys() - set(PACKAGES))):
        version, needed = _version(package), requirements.get(package, "")
        problem = None
        if version is None or _numbers(version) < _numbers(needed):
            problem = f"{package} {version or 'is missing'}, expected {needed or 'any version'} or "
            problem += f'newer. Run: pip install "{package}>={needed or 0}"'
        if problem or package in PACKAGES:
            yield Finding(package, version or "missing", problem)
    yield _guarded("devices", _devices, "Correct JAX_PLATFORMS, or install JAX again.")
    yield _guarded("cores", _cores, "")
    yield _guarded(
        "compiled programs", _cache, "Set XDG_CACHE_HOME to a folder that can be written."
    )
    yield Finding("data sets", _data_sets())
    for name, extra in EXTRAS.items():
        version = _version(extra.package)
        remedy = f'pip install "fedpax[{name}]" for {extra.use}'
        yield Finding(
            f"extra {name}", f"{extra.package} {version}" if version else f"not here: {remedy}"
        )


def _guarded(name: str, look: Callable[[], str], remedy: str) -> Finding:
    """Turn an error into a problem, whatever it is."""
    try:
        return Finding(name, look())
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Finding(name, f"broken ({reason})", f"{name}: {reason}. {remedy}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> dict[str, str]:
    """Return the oldest version of each package that fedpax requires, as installed."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH, not installed
        return {}
    installed = [
        re.match(r"([\w.-]+)(?:>=([\d.]+))?", line) for line in lines if "extra ==" not in line
    ]
    return {match[1]: match[2] or "" for match in installed if match}


def _numbers(version: str) -> list[int]:
    leading = re.match(r"[\d.]*", version)
    return [int(part) for part in (leading[0] if leading else "").split(".") if part]


def _devices() -> str:
    import jax

    from fedpax.commands.parts.devices import skip_absent_tpus

    skip_absent_tpus()
    kinds = [device.device_kind for device in jax.devices()]
    counts = ", ".join(f"{kinds.count(name)} {name}" for name in dict.fromkeys(kinds))
    return f"{counts} ({jax.default_backend()})"


def _cores() -> str:
    from fedpax.commands.parts.devices import num_cores

    return str(num_cores())


def _cache() -> str:
    import jax

    from fedpax.commands.parts.devices import enable_compilation_cache

    enable_compilation_cache()
    if not jax.config.values["jax_enable_compilation_cache"]:
        return "not kept (JAX_ENABLE_COMPILATION_CACHE=0)"
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder:
        raise OSError("no folder for them can be created")
    if "://" in folder:
        return folder
    files = [path for path in Path(folder).glob("*-cache") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder} cannot be written")
    return f"{len(files)}, {size / 1e6:.1f} MB in {folder}"


def _data_sets() -> str:
    from fedpax.sources.data_sets import data_folder

    try:
        folder = data_folder(None)
    except ValueError as error:
        return str(error)
    names = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
    return f"{', '.join(names) or 'none prepared'} in {folder}"
