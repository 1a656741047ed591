"""The fast tests load the programs that they compiled before, and see the same programs."""

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast_compilation import (
    KeptPrograms,
    describe_machine,
    keep_programs,
    share_compiled_programs,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

COMPILER = "jax._src.compiler.backend_compile_and_load"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Share programs as a new process does; return a list that gets all that it compiles."""
    # Without what the session shares: a program that was loaded cannot be written again.
    compiler = inspect.unwrap(pytest.importorskip("jax._src.compiler").backend_compile_and_load)

    def start_process() -> list[str]:
        compiled: list[str] = []

        def compile_anew(*arguments: object) -> object:
            compiled.append(str(arguments[1]))
            return compiler(*arguments)

        jax.clear_caches()
        monkeypatch.setattr(COMPILER, compile_anew)
        share_compiled_programs(KeptPrograms(tmp_path))
        return compiled

    return start_process


def instructions(text: str | None) -> str:
    """Return compiled text without its table of source lines, and without the rows there."""
    header, _, lines = (text or "").partition("\n")
    return header + re.sub(r"stack_frame_id=\d+", "", lines[lines.index("\n%") :])


def test_another_process_loads_the_same_program(
    start: Callable[[], list[str]], clients_fsdp: Callable[[str], Mesh], rng: np.random.Generator
) -> None:
    sharding = NamedSharding(clients_fsdp("automatic"), PartitionSpec("clients", "fsdp"))
    values = rng.normal(size=(8, 4)).astype(np.float32)
    compiled, seen = [], []
    for _ in range(2):
        compiled.append(start())
        program = jax.jit(lambda x: jnp.tanh(x - x.mean(0)) * 2, donate_argnums=0)
        x = jax.device_put(values, sharding)
        stage = program.lower(x).compile()
        text = instructions(stage.as_text())
        assert "all-reduce" in text and "input_output_alias" in text
        result = np.asarray(program(x)).tobytes()
        assert x.is_deleted()
        seen.append((text, str(stage.memory_analysis()), stage.cost_analysis(), result))
    assert len(compiled[0]) == 1 and not compiled[1]
    assert seen[0] == seen[1]


def test_other_text_options_and_flags_are_other_programs(
    start: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = start()
    option = {"xla_cpu_enable_fast_math": True}
    jax.jit(lambda x: x * 3.5)(1.0)
    jax.jit(lambda x: x * 3.5, compiler_options=option)(1.0)
    jax.jit(lambda x: x * 4.5)(1.0)
    assert len(compiled) == 3
    machine = describe_machine()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert describe_machine() != machine


def test_a_torn_file_is_compiled_anew(start: Callable[[], list[str]], tmp_path: Path) -> None:
    counts = []
    for damage in ("none yet", "none", "empty", "none", "short"):
        if damage != "none yet":
            (path,) = tmp_path.iterdir()
            whole = path.read_bytes()
            path.write_bytes({"none": whole, "empty": b"", "short": whole[:-100]}[damage])
        compiled = start()
        assert float(jax.jit(lambda x: x * 5.5)(1.0)) == 5.5
        counts.append(len(compiled))
    assert counts == [1, 0, 1, 0, 1]


def test_the_programs_that_were_not_used_for_the_longest_time_are_deleted(tmp_path: Path) -> None:
    for second, name in enumerate("acbd"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (second, second))
    KeptPrograms(tmp_path).forget(limit=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d"]


def test_without_a_folder_that_can_be_written_none_are_kept() -> None:
    class Cache:
        def mkdir(self, name: str) -> Path:
            raise PermissionError(name)

    assert keep_programs(Cache()) is None and keep_programs(None) is None
