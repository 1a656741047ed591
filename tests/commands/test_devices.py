"""Tests of the search for TPUs, which libtpu makes noisy on machines without one."""

import importlib.util
from pathlib import Path
from typing import Any

import jax
import pytest

from fedpax.commands.parts import devices, options
from fedpax.commands.syncer import syncer
from fedpax.errors import UsageError
from fedpax.parallel.mesh import MeshConfig
from fedpax.sites.site_process import SyncerResult


def pci_device(root: Path, name: str, vendor: str, kind: str) -> None:
    folder = root / "sys" / "bus" / "pci" / "devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_a_machine_without_a_tpu(tmp_path: Path) -> None:
    assert not devices.has_tpu(tmp_path)
    pci_device(tmp_path, "0000:00:01.0", "0x8086", "0x060000")
    pci_device(tmp_path, "0000:00:02.0", "0x1ae0", "0x020000")  # Google's network card
    pci_device(tmp_path, "0000:00:03.0", "0x1ae0", "0x010802")  # its disk
    (tmp_path / "sys/bus/pci/devices/broken").mkdir()
    (tmp_path / "dev" / "vfio").mkdir(parents=True)
    (tmp_path / "dev" / "vfio" / "vfio").touch()
    assert not devices.has_tpu(tmp_path)


@pytest.mark.parametrize("found", ["dev/accel0", "dev/vfio/0", "pci"])
def test_a_machine_with_a_tpu(tmp_path: Path, found: str) -> None:
    if found == "pci":
        pci_device(tmp_path, "0000:00:05.0", "0x1ae0", "0x088000")
    else:
        (tmp_path / found).parent.mkdir(parents=True)
        (tmp_path / found).touch()
    assert devices.has_tpu(tmp_path)


@pytest.mark.parametrize(
    ("libtpu", "plugins", "tpu", "asked", "expected"),
    [
        (True, [], False, None, "cpu"),
        (False, [], False, None, None),
        (True, ["cuda"], False, None, None),  # the GPU's own messages matter
        (True, [], True, None, None),
        (True, [], False, "tpu", "tpu"),
    ],
)
def test_tpus_are_skipped_only_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
    libtpu: bool,
    plugins: list[str],
    tpu: bool,
    asked: str | None,
    expected: str | None,
) -> None:
    before = jax.config.values["jax_platforms"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu or None)
    monkeypatch.setattr(devices.importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(devices, "has_tpu", lambda root: tpu)
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    try:
        jax.config.update("jax_platforms", asked)
        devices.skip_absent_tpus()
        assert jax.config.values["jax_platforms"] == expected
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("Unable to initialize backend 'tpu'"), "Unable to initialize backend 'tpu'"),
        (AssertionError(), "JAX_PLATFORMS=cpu has none here"),  # JAX's, for cuda without a plugin
    ],
)
def test_platforms_that_are_not_there_are_told_in_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def device_count() -> int:
        raise error

    monkeypatch.setattr(jax, "device_count", device_count)
    with pytest.raises(UsageError, match=f"{words}.*Correct or unset JAX_PLATFORMS"):
        devices.provide_devices(MeshConfig(fsdp=2))


def test_more_devices_than_a_cpu_simulates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1000000")
    with pytest.raises(UsageError, match="JAX_NUM_CPU_DEVICES=1000000: expected at most 1,024"):
        devices.provide_devices(MeshConfig(fsdp=2))


def test_a_process_that_uses_jax_already_is_told_how_to_get_more_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    jax.devices()
    words = (
        "needs 16 .* start Python with JAX_NUM_CPU_DEVICES=16 .* number is fixed. If the "
        "experiment's file uses JAX when it is imported, use NumPy there"
    )
    with pytest.raises(UsageError, match=words):
        devices.provide_devices(MeshConfig(clients=16))


def test_a_configuration_made_in_python_looks_for_no_absent_tpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(options, "skip_absent_tpus", lambda: called.append(True))
    options.configure("pretrain_text", [])
    assert called == [True]


def test_a_syncer_takes_no_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = jax.config.values["jax_platforms"], []

    def run_syncer(*arguments: Any, **settings: Any) -> SyncerResult:
        seen.append(jax.config.values["jax_platforms"])
        return SyncerResult(0, False, None)

    monkeypatch.setattr("fedpax.islands.syncer.run_syncer.run_syncer", run_syncer)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    try:
        jax.config.update("jax_platforms", None)
        arguments = ("--exp=decoupled_diloco_text", f"--job_log_dir={tmp_path}/run")
        syncer([*arguments, "--listen=127.0.0.1:0"])
    finally:
        jax.config.update("jax_platforms", before)
    assert seen == ["cpu"]
