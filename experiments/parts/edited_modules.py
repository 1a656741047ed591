"""Imports the module of an experiment of one's own, and imports it again when it was edited.

A notebook's kernel runs many commands in one process. Python itself imports a module once.
"""

import contextlib
import hashlib
import importlib.util
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class _Imports(NamedTuple):
    """The modules of a folder that experiments have imported."""

    former: frozenset[str]  # names of all modules that were imported before by other code
    when: float  # time of the last import; modules that were imported later have no digest
    digests: dict[str, bytes]  # digests of the files by module


_IMPORTS: dict[Path, _Imports] = {}
_LOCK = threading.RLock()  # threads can run commands, and see no half of an import


def import_newest(name: str, folder: Path) -> ModuleType:
    """Import a module; if it or a module beside it was edited since, import all of them again."""
    # Modules beside it are those in and below its folder that it has imported. Modules that other
    # code had imported before, installed modules and modules of fedpax stay as they are.
    with _LOCK:
        seen = _IMPORTS.get(folder)
        if seen is None:
            seen = _Imports(frozenset(sys.modules) - {name}, _process_start(), {})
        files = {n: file for n, file in _files_below(folder).items() if n not in seen.former}
        if any(_is_edited(n, file, seen) for n, file in files.items()):
            for n, file in files.items():
                del sys.modules[n]
                # Its bytecode counts as newer than an edit in the same second of the same length.
                with contextlib.suppress(OSError, NotImplementedError):
                    os.unlink(importlib.util.cache_from_source(file))
        importlib.invalidate_caches()
        when = time.time()
        module = importlib.import_module(name)
        digests = {
            n: _digest(file) for n, file in _files_below(folder).items() if n not in seen.former
        }
        _IMPORTS[folder] = _Imports(seen.former, when, digests)
        return module


def folder_of_module(name: str) -> Path | None:
    """Return the folder on the path in which a module is found; None if it is installed."""
    with contextlib.suppress(ValueError):  # a module without a specification, such as __main__
        if (spec := importlib.util.find_spec(name.partition(".")[0])) is not None:
            folders = spec.submodule_search_locations
            place = next(iter(folders), None) if folders is not None else spec.origin
            if place and not _is_installed(place):
                return Path(place).resolve().parent
    return None


def _files_below(folder: Path) -> dict[str, str]:
    """Return the files of the imported modules below a folder; installed ones are left out."""
    imported = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_below = file.startswith(f"{folder}{os.sep}") and not _is_installed(file)
        if (
            is_below
            and file.endswith(".py")
            and name.partition(".")[0] not in ("fedpax", "__main__")
        ):
            imported[name] = file
    return imported


def _is_installed(place: str) -> bool:
    return "site-packages" in place or place.startswith(sys.base_prefix + os.sep)


def _is_edited(name: str, file: str, seen: _Imports) -> bool:
    if name in seen.digests:
        return _digest(file) != seen.digests[name]
    try:
        return os.stat(file).st_mtime > seen.when - 1.0  # clocks of file systems are coarse
    except OSError:
        return True


def _digest(file: str) -> bytes:
    try:
        return hashlib.sha256(Path(file).read_bytes()).digest()
    except OSError:
        return b""


def _process_start() -> float:
    """Return when this process started: a file that is older was imported as it is."""
    # Where this is unknown, return 0: then a module that other code has imported is imported again.
    try:
        status = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(status.rpartition(")")[2].split()[19])
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
