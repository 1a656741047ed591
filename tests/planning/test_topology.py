import importlib.metadata
import importlib.util

import jax
import pytest

from fedpax.chips import CHIPS, chip_of
from fedpax.planning.topology import TopologyError, find_topology, foreign_libtpu


def test_simulated_devices_are_those_of_the_process():
    topology = find_topology("cpu:4")
    assert topology.devices == tuple(jax.devices()[:4])
    assert (topology.chip, topology.shape, topology.slices, topology.chips) == (None, (), 1, 4)


@pytest.mark.parametrize(
    ("name", "slices", "words"),
    [
        ("v5q:4x4", 1, ["unknown device 'v5q'", "Did you mean v5"]),
        ("v9:4x4", 1, ["unknown device 'v9'", "v5e and v6e", "v5p", "tpu7x", "cpu:8", "gpu"]),
        ("v5e", 1, ["has 2 dimensions, such as v5e:4x4"]),
        ("v5e:4x4x4", 1, ["has 2 dimensions"]),
        ("v5p:4x4", 1, ["has 3 dimensions, such as v5p:4x4x4"]),
        ("v5e:3x4", 1, ["must be even"]),
        ("v5e:0x4", 1, ["must be even"]),
        ("v5e:32x16", 1, ["at most 256 chips", "slices="]),
        ("v5e:axb", 1, ["'axb' is not a size"]),
        ("v5e:4x4", 0, ["slices=0", "at least 1"]),
        ("cpu:8", 2, ["has no slices"]),
        ("cpu", 1, ["one number of devices"]),
        ("cpu:4x2", 1, ["one number of devices"]),
        ("cpu:9", 1, ["this process has 8 CPU devices"]),
        ("cpu:1000000", 1, ["simulates at most 1,024 devices"]),
        ("gpu", 1, ["this machine has 0 GPUs", "fedpax[cuda]"]),
    ],
)
def test_unknown_topologies_raise_with_a_remedy(name: str, slices: int, words: list[str]):
    with pytest.raises(TopologyError) as error:
        find_topology(name, slices)
    assert all(word in str(error.value) for word in words)


def test_missing_libtpu_raises_with_a_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TopologyError, match=r"pip install 'fedpax\[tpu\]'"):
        find_topology("v5e:4x4")


@pytest.mark.parametrize("version", ["0.0.42.1", "0.0.421"])
def test_another_libtpu_than_jax_names_is_told(monkeypatch: pytest.MonkeyPatch, version: str):
    named = {"jax": ["jaxlib<=1", 'libtpu==0.0.42.*; extra == "tpu"']}
    monkeypatch.setattr(importlib.metadata, "requires", named.get)
    monkeypatch.setattr(importlib.metadata, "version", {"libtpu": version}.get)
    messages = foreign_libtpu()
    if version == "0.0.42.1":
        assert messages is None
    else:
        assert messages is not None and "pip install 'libtpu==0.0.42.*'" in messages


@pytest.mark.parametrize(
    ("name", "slices", "chips", "devices"),
    [
        ("v4:2x2x2", 1, 8, 8),
        ("v5e:4x4", 2, 32, 32),
        ("v5p:2x2x4", 1, 16, 16),
        ("v6e:4x4", 1, 16, 16),
        ("tpu7x:2x2x1", 1, 4, 8),
    ],
)
def test_tpu_topologies_have_their_chips_and_devices(
    tpu_devices, name: str, slices: int, chips: int, devices: int
):
    topology = find_topology(name, slices)
    assert topology.chip is CHIPS[name.partition(":")[0]]
    assert (topology.chips, len(topology.devices)) == (chips, devices)
    assert {chip_of(device.device_kind) for device in topology.devices} == {topology.chip}
    assert topology.shape == tuple(map(int, name.partition(":")[2].split("x")))


def test_the_specifications_of_chips_are_consistent():
    for chip in CHIPS.values():
        assert 1e14 < chip.peak_flops < 1e16
        assert 1e10 < chip.hbm_bytes < 1e12 and chip.source.startswith("https://")
        assert 0.95 * chip.hbm_bytes < chip.usable_hbm_bytes < 1.01 * chip.hbm_bytes
        # Memory is faster than the links, the links are faster than the network between slices.
        assert chip.hbm_bandwidth > chip.links * chip.link_bandwidth > chip.dcn_bandwidth
    # A pod's published bisection: v5e 1.6 TB/s, v6e 3.2 TB/s, over 2 x 16 links in both directions.
    assert 2 * 16 * CHIPS["v5e"].link_bandwidth == 1.6e12
    assert 2 * 16 * CHIPS["v6e"].link_bandwidth == 3.2e12
