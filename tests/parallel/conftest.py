"""TPUs that are not there, to compile for, and text that was compiled for them before."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


@dataclass(frozen=True)
class SliceDevice:
    """What a TPU in one of several slices tells of itself."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


@pytest.fixture(scope="session")
def tpu_devices() -> Callable[..., list[jax.Device]]:
    """Gives devices such as "v5e:2x2" in a number of slices; skips where libtpu is missing."""
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
    """Makes the mesh of the recorded text: (islands, fsdp) over two TPU slices of 4 devices."""

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
