"""What accelerator chips can do at best, from what their makers publish."""

from __future__ import annotations

import re
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """The published figures of a chip.

    Attributes:
      name: as in a topology's name, such as "v5p".
      kind: a regular expression of what `jax.Device.device_kind` says.
      peak_flops: floating-point operations a second, of dense bfloat16 products.
      int8: operations a second of products of 8-bit integers, or as `peak_flops`.
      fp8: operations a second of products of 8-bit floats, or as `peak_flops`.
      memory: bytes of high-bandwidth memory.
      usable: of these, the bytes that a program can have; for TPUs, what their compiler allows.
      memory_bandwidth: bytes a second, to and from it.
      link_bandwidth: bytes a second that one link to a neighbour carries in one direction.
      links: such links of a chip; a torus has two in each dimension, a switch counts as one.
      network_bandwidth: bytes a second of the network between slices (or hosts), one direction,
        a chip's share of its host's.
      dimensions: of the torus that a slice is; 0 where a switch joins the chips.
      ring: a dimension of a slice closes to a ring if its size is a multiple of this.
      largest: chips in the largest slice.
      devices: how many devices JAX shows of a chip.
      source: where the figures are published.
    """

    name: str
    kind: str
    peak_flops: float
    int8: float
    fp8: float
    memory: float
    usable: float
    memory_bandwidth: float
    link_bandwidth: float
    links: int
    network_bandwidth: float
    dimensions: int
    ring: int
    largest: int
    devices: int
    source: str


def _tpu(name: str, kind: str, **figures: float) -> Chip:
    dimensions = int(figures["dimensions"])
    return Chip(
        name=name,
        kind=kind,
        peak_flops=figures["peak_flops"],
        int8=figures.get("int8", figures["peak_flops"]),
        fp8=figures.get("fp8", figures["peak_flops"]),
        memory=figures["memory"],
        usable=figures.get("usable", figures["memory"]),
        memory_bandwidth=figures["memory_bandwidth"],
        link_bandwidth=figures["link_bandwidth"],
        links=2 * dimensions,
        network_bandwidth=figures["network_bandwidth"],
        dimensions=dimensions,
        # Figures of rings: "How to Scale Your Model", part 2, jax-ml.github.io/scaling-book/tpus.
        ring=16 if dimensions == 2 else 4,
        largest=int(figures["largest"]),
        devices=int(figures.get("devices", 1)),
        source=f"https://docs.cloud.google.com/tpu/docs/{name}",
    )


def _gpu(name: str, kind: str, **figures: float) -> Chip:
    return Chip(
        name=name,
        kind=kind,
        peak_flops=figures["peak_flops"],
        int8=figures.get("int8", figures["peak_flops"]),
        fp8=figures.get("fp8", figures["peak_flops"]),
        memory=figures["memory"],
        usable=figures.get("usable", figures["memory"]),
        memory_bandwidth=figures["memory_bandwidth"],
        link_bandwidth=figures["link_bandwidth"],
        links=1,
        network_bandwidth=figures["network_bandwidth"],
        dimensions=0,
        ring=1,
        largest=8,  # of a host; NVLink switches that join several hosts are not modelled
        devices=1,
        source=f"https://www.nvidia.com/en-us/data-center/{name.lower().partition('-')[0]}/",
    )


# TPUs: the page of each says what a chip computes and holds, its bandwidth to neighbours in both
# directions together (half of it, divided by the links, is that of a link in one direction), and
# to the data centre's network. What a page leaves out has a comment of its own. What is usable is
# what libtpu 0.0.42 names when a program needs more.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu(
            "v4",
            r"TPU v4",
            peak_flops=275e12,
            memory=32 * GIB,
            usable=30.75 * GIB,
            memory_bandwidth=1.2e12,
            link_bandwidth=50e9,  # 6 links of 50 GB/s: arXiv:2304.01433, table 4
            network_bandwidth=6.25e9,  # not published: 25 GB/s a host, as the book above has it
            dimensions=3,
            largest=4096,
        ),
        _tpu(
            "v5e",
            r"TPU (v5 lite|v5e)",
            peak_flops=197e12,
            int8=393e12,
            memory=16 * GIB,
            usable=15.75 * GIB,
            memory_bandwidth=819e9,
            link_bandwidth=400e9 / 2 / 4,
            network_bandwidth=6.4e12 / 8 / 256,  # 6.4 Tbit/s for a pod of 256
            dimensions=2,
            largest=256,
        ),
        _tpu(
            "v5p",
            r"TPU (v5|v5p)",
            peak_flops=459e12,
            int8=918e12,  # the book above has it
            memory=95 * GIB,
            usable=95.74 * GIB,
            memory_bandwidth=2.765e12,
            link_bandwidth=1200e9 / 2 / 6,
            network_bandwidth=50e9 / 8,
            dimensions=3,
            largest=8960,
        ),
        _tpu(
            "v6e",
            r"TPU (v6 lite|v6e)",
            peak_flops=918e12,
            int8=1836e12,
            memory=32 * GIB,
            usable=31.25 * GIB,
            memory_bandwidth=1.638e12,
            link_bandwidth=800e9 / 2 / 4,
            network_bandwidth=100e9 / 8,
            dimensions=2,
            largest=256,
        ),
        _tpu(
            "tpu7x",
            r"TPU ?7x",
            peak_flops=2307e12,
            fp8=4614e12,
            memory=192 * GIB,
            usable=2 * 94.75 * GIB,
            memory_bandwidth=7.38e12,
            link_bandwidth=1200e9 / 2 / 6,
            network_bandwidth=100e9 / 8,
            dimensions=3,
            largest=9216,
            devices=2,  # its two chiplets, each with half of the figures
        ),
        # GPUs: the data sheet of each has dense bfloat16 (half of what it gives with sparsity),
        # memory, and NVLink in both directions together. The network of a host is what is bought
        # with it; one adapter of 400 Gbit/s (A100: 200) for each GPU is what its maker's own
        # systems have.
        _gpu(
            "A100",
            r"NVIDIA A100-SXM4-80GB",
            peak_flops=312e12,
            int8=624e12,
            memory=80 * GIB,
            memory_bandwidth=2.039e12,
            link_bandwidth=600e9 / 2,
            network_bandwidth=200e9 / 8,
        ),
        _gpu(
            "H100",
            r"NVIDIA H100 80GB HBM3",
            peak_flops=989.4e12,
            int8=1978.9e12,
            fp8=1978.9e12,
            memory=80 * GIB,
            memory_bandwidth=3.35e12,
            link_bandwidth=900e9 / 2,
            network_bandwidth=400e9 / 8,
        ),
        _gpu(
            "H200",
            r"NVIDIA H200",
            peak_flops=989.4e12,
            int8=1978.9e12,
            fp8=1978.9e12,
            memory=141e9,
            memory_bandwidth=4.8e12,
            link_bandwidth=900e9 / 2,
            network_bandwidth=400e9 / 8,
        ),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """Finds the chip of a device.

    Args:
      device_kind: what `jax.Device.device_kind` says.

    Returns:
      The chip, or None for one that is not in the table, such as a CPU.

    Example:
      >>> chip_of("TPU v5 lite").name, chip_of("TPU v5").name, chip_of("cpu")
      ('v5e', 'v5p', None)
    """
    return next((chip for chip in CHIPS.values() if re.fullmatch(chip.kind, device_kind)), None)
