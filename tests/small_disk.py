"""A disk that tests can fill."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk_at(folder: Path, size: str) -> Iterator[None]:
    """Mount a small file system of its own on a folder, or skip the test."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(mount, capture_output=True).returncode == 0:
            try:
                yield
            finally:
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
            return
    pytest.skip("a file system of its own needs root")
