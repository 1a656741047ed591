"""Tests of the persistent compilation cache of the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fedpax.commands.parts.devices import enable_compilation_cache
from fedpax.run_files.metrics import TIMINGS, read_metrics
from fedpax.sources.data_sets import data_folder

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Allow the cache, below a folder of the test; restore JAX's settings after it."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    yield tmp_path / "fedpax" / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_are_kept_in_the_users_cache_folder(cache: Path) -> None:
    enable_compilation_cache()
    jax.jit(lambda x: x + 1.25)(1.0)  # compiles much faster than JAX's limit of a second
    assert len(list(cache.glob("*-cache"))) == 1
    assert cache.stat().st_mode & 0o077 == 0  # JAX executes what it finds there


def test_a_relative_cache_home_is_ignored(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    enable_compilation_cache()
    assert (tmp_path / "home" / ".cache" / "fedpax" / "jax").is_dir()


def test_without_a_home_folder_no_folder_of_this_name_is_made(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(user: int) -> None:  # as in a container with a user id of its own
        raise KeyError(user)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "TFDS_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    with pytest.raises(ValueError, match=r"tensorflow_datasets begins with .* Set the env.* HOME"):
        data_folder(None)
    assert not [*tmp_path.iterdir()]


def test_jaxs_own_settings_come_first(cache: Path, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None and not cache.exists()


def test_a_cache_folder_that_cannot_be_created_gives_no_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_a_second_start_compiles_no_round_and_trains_the_same(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    del environment["JAX_ENABLE_COMPILATION_CACHE"]
    lines = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "fedpax.main", "train", "--exp=fedavg_digits"]
        command += ["--training.rounds=1", f"--job_log_dir={tmp_path / name}"]
        subprocess.run(command, env=environment, check=True)
        (program,) = (tmp_path / "cache" / "fedpax" / "jax").glob("jit_fedavg_round-*-cache")
        stripped = [
            {key: value for key, value in line.items() if key not in TIMINGS}
            for line in read_metrics(tmp_path / name)
        ]
        lines.append((program.stat().st_mtime_ns, json.dumps(stripped)))
    assert lines[0] == lines[1]  # the bytes per round too, which are read from the compiled text
