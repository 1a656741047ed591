import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small_regression import regression

from fedpax.chips import CHIPS
from fedpax.training.experiment import Run
from fedpax.training.flops_utilization import utilization_of
from fedpax.training.progress import Progress
from fedpax.training.startup_report import announce


def run_on(device_kind: str, count: int, **fields: Any) -> Run:
    devices = np.array([SimpleNamespace(device_kind=device_kind) for _ in range(count)])
    return (
        regression().build()._replace(mesh=SimpleNamespace(devices=devices, size=count), **fields)
    )


@pytest.mark.parametrize(
    ("device_kind", "count", "flops", "tokens_per_second", "expected"),
    [
        # Llama 3.1 8B, 8,192 tokens: 7,207 tokens a second and chip are 45.46% of v6e's peak.
        ("TPU v6 lite", 256, 0.4546 * 918e12 / 7207, 7207 * 256, 0.4546),
        ("TPU v4", 6144, 3.278e12, 238.3e3, 0.462),  # PaLM 540B
        ("TPU7x", 8, 1e9, 2307e12 * 4 / 1e9, 1.0),  # two devices are one chip
    ],
)
def test_mfu_is_that_of_the_chips(
    device_kind: str, count: int, flops: float, tokens_per_second: float, expected: float
) -> None:
    run = run_on(device_kind, count, flops_per_item=flops, flops_convention="all pairs")
    utilization = utilization_of(run)
    assert utilization.mfu(tokens_per_second) == pytest.approx(expected, rel=1e-3)
    text = utilization.describe("tokens")
    assert "FLOPs per token (all pairs)" in text
    peak = CHIPS[utilization.chip].peak_flops / 1e12
    assert f"of {utilization.num_chips} {utilization.chip} with {peak:.4g} bfloat16" in text


def test_mfu_is_unknown_without_flops_or_without_a_peak() -> None:
    assert utilization_of(run_on("TPU v4", 4)) is None
    assert utilization_of(run_on(jax.devices()[0].device_kind, 4, flops_per_item=1e9)) is None


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (("gpu", "NVIDIA Unheard-of"), "no MFU: .* 'NVIDIA Unheard-of' are not known, expected.*"),
        (("tpu", "TPU v5 lite"), r"MFU counts 1e\+09 FLOPs per example .*"),
        (("cpu", "cpu"), None),
    ],
)
def test_a_missing_mfu_is_announced_where_a_chip_could_be_added(
    device: tuple[str, str], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    platform, kind = device
    run = run_on(kind, jax.device_count(), flops_per_item=1e9)
    for one in run.mesh.devices:
        one.platform = platform
    run.mesh.shape = {"clients": 4}
    progress = Progress("run", rounds_done=0, rounds=1)
    announce(progress, regression(), run, 4, tmp_path, 0, utilization_of(run))
    lines = [line for line in capsys.readouterr().err.splitlines() if "MFU" in line]
    assert (lines == []) == (words is None)
    assert all(re.fullmatch(f"run: {words}", line) for line in lines)
