"""Specifications of accelerator chips, as their makers publish them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """The published specifications of a chip.

    Attributes:
        name: name in a topology, such as "v5p".
        device_kind: regular expression that matches `jax.Device.device_kind`.
        peak_flops: dense bfloat16 matmul FLOPs per second.
        peak_int8_ops: the same with 8-bit integers; `peak_flops` without faster units.
        peak_fp8_flops: the same with 8-bit floats; `peak_flops` without faster units.
        hbm_bytes: bytes of high-bandwidth memory.
        usable_hbm_bytes: the part that a program can use; for TPUs, their compiler's limit.
        hbm_bandwidth: bytes per second between the chip and its memory.
        link_bandwidth: bytes per second of one link to a neighbor, in one direction.
        links: number of links; a torus has two per dimension, a switch counts as one.
        dcn_bandwidth: the chip's share of bytes per second between slices (or hosts), in one
            direction.
        torus_dimensions: dimensions of the torus of a slice; 0 if a switch joins the chips.
        ring_multiple: a dimension of a slice closes to a ring if its size is a multiple of this.
        max_chips_per_slice: chips of the largest slice.
        devices_per_chip: JAX devices of a chip.
        source: address of the page with the specifications.
    """

    name: str
    device_kind: str
    peak_flops: float
    peak_int8_ops: float
    peak_fp8_flops: float
    hbm_bytes: float
    usable_hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    links: int
    dcn_bandwidth: float
    torus_dimensions: int
    ring_multiple: int
    max_chips_per_slice: int
    devices_per_chip: int
    source: str


def _tpu(name: str, device_kind: str, torus_dimensions: int, **specifications: float) -> Chip:
    return _chip(
        name=name,
        device_kind=device_kind,
        torus_dimensions=torus_dimensions,
        links=2 * torus_dimensions,
        # Figures of rings: "How to Scale Your Model", part 2, jax-ml.github.io/scaling-book/tpus.
        ring_multiple=16 if torus_dimensions == 2 else 4,
        source=f"https://docs.cloud.google.com/tpu/docs/{name}",
        **specifications,
    )


def _gpu(name: str, device_kind: str, hbm_bytes: float, **specifications: float) -> Chip:
    return _chip(
        name=name,
        device_kind=device_kind,
        hbm_bytes=hbm_bytes,
        usable_hbm_bytes=hbm_bytes,
        links=1,
        torus_dimensions=0,
        ring_multiple=1,
        # GPUs of a host; NVLink switches that join several hosts are not modeled.
        max_chips_per_slice=8,
        source=f"https://www.nvidia.com/en-us/data-center/{name.lower().partition('-')[0]}/",
        **specifications,
    )


def _chip(**specifications: Any) -> Chip:
    peak = specifications["peak_flops"]
    defaults = {"peak_int8_ops": peak, "peak_fp8_flops": peak, "devices_per_chip": 1}
    return Chip(**defaults | specifications)


# TPUs: a chip's page gives its peaks, its memory, its bandwidth to neighbors in both directions
# together (a link in one direction has half of it divided by the number of links), and the
# bandwidth to the data center's network. Figures that a page leaves out have a comment. The usable
# memory is the limit of libtpu 0.0.42.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu(
            "v4",
            r"TPU v4",
            peak_flops=275e12,
            hbm_bytes=32 * GIB,
            usable_hbm_bytes=30.75 * GIB,
            hbm_bandwidth=1.2e12,
            link_bandwidth=50e9,  # 6 links of 50 GB/s: arXiv:2304.01433, table 4
            dcn_bandwidth=6.25e9,  # not published; 25 GB/s per host in the book above
            torus_dimensions=3,
            max_chips_per_slice=4096,
        ),
        _tpu(
            "v5e",
            r"TPU (v5 lite|v5e)",
            peak_flops=197e12,
            peak_int8_ops=393e12,
            hbm_bytes=16 * GIB,
            usable_hbm_bytes=15.75 * GIB,
            hbm_bandwidth=819e9,
            link_bandwidth=400e9 / 2 / 4,
            dcn_bandwidth=6.4e12 / 8 / 256,  # 6.4 Tbit/s for a pod of 256
            torus_dimensions=2,
            max_chips_per_slice=256,
        ),
        _tpu(
            "v5p",
            r"TPU (v5|v5p)",
            peak_flops=459e12,
            peak_int8_ops=918e12,  # from the book above
            hbm_bytes=95 * GIB,
            usable_hbm_bytes=95.74 * GIB,
            hbm_bandwidth=2.765e12,
            link_bandwidth=1200e9 / 2 / 6,
            dcn_bandwidth=50e9 / 8,
            torus_dimensions=3,
            max_chips_per_slice=8960,
        ),
        _tpu(
            "v6e",
            r"TPU (v6 lite|v6e)",
            peak_flops=918e12,
            peak_int8_ops=1836e12,
            hbm_bytes=32 * GIB,
            usable_hbm_bytes=31.25 * GIB,
            hbm_bandwidth=1.638e12,
            link_bandwidth=800e9 / 2 / 4,
            dcn_bandwidth=100e9 / 8,
            torus_dimensions=2,
            max_chips_per_slice=256,
        ),
        _tpu(
            "tpu7x",
            r"TPU ?7x",
            peak_flops=2307e12,
            peak_fp8_flops=4614e12,
            hbm_bytes=192 * GIB,
            usable_hbm_bytes=2 * 94.75 * GIB,
            hbm_bandwidth=7.38e12,
            link_bandwidth=1200e9 / 2 / 6,
            dcn_bandwidth=100e9 / 8,
            torus_dimensions=3,
            max_chips_per_slice=9216,
            devices_per_chip=2,  # its two chiplets, each with half of the chip's resources
        ),
        # GPUs: a chip's data sheet gives dense bfloat16 (half of its FLOPs with sparsity), memory,
        # and NVLink in both directions together. Assumed is one network adapter of 400 Gbit/s
        # (A100: 200) per GPU, as in the maker's own systems.
        _gpu(
            "A100",
            r"NVIDIA A100-SXM4-80GB",
            peak_flops=312e12,
            peak_int8_ops=624e12,
            hbm_bytes=80 * GIB,
            hbm_bandwidth=2.039e12,
            link_bandwidth=600e9 / 2,
            dcn_bandwidth=200e9 / 8,
        ),
        _gpu(
            "H100",
            r"NVIDIA H100 80GB HBM3",
            peak_flops=989.4e12,
            peak_int8_ops=1978.9e12,
            peak_fp8_flops=1978.9e12,
            hbm_bytes=80 * GIB,
            hbm_bandwidth=3.35e12,
            link_bandwidth=900e9 / 2,
            dcn_bandwidth=400e9 / 8,
        ),
        _gpu(
            "H200",
            r"NVIDIA H200",
            peak_flops=989.4e12,
            peak_int8_ops=1978.9e12,
            peak_fp8_flops=1978.9e12,
            hbm_bytes=141e9,
            hbm_bandwidth=4.8e12,
            link_bandwidth=900e9 / 2,
            dcn_bandwidth=400e9 / 8,
        ),
    )
}
"""The specifications of chips, by name."""


def chip_of(device_kind: str) -> Chip | None:
    """Find the chip of a device.

    Returns:
        The chip, or None if the table `CHIPS` does not have it, such as a CPU.

    Example:
        >>> chip_of("TPU v5 lite").name, chip_of("TPU v5").name, chip_of("cpu")
        ('v5e', 'v5p', None)
    """
    matching = (chip for chip in CHIPS.values() if re.fullmatch(chip.device_kind, device_kind))
    return next(matching, None)
