"""The order of a cohort's clients on the devices, so that all devices finish at the same time.

A device runs its clients one chunk after another, and a chunk takes as long as its longest client.
Clients of similar size therefore share a chunk, and chunks are assigned to devices by longest
processing time first.
"""

import heapq

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError


def balanced_order(
    num_steps: ArrayLike, num_devices: int = 1, *, chunk_size: int = 1
) -> Int64[np.ndarray, " clients"]:
    """Order clients so that devices with equal blocks of them finish at nearly the same time.

    Clients are sorted by size and split into chunks of `chunk_size`. Each chunk, the largest first,
    goes to the device that has the least work so far and still has room. All devices get the same
    number of clients, as a sharded axis requires, each device its largest clients first.

    Args:
        num_steps: integers `[clients]`, each client's local steps, or any other measure of its
            work.
        num_devices: the number of devices that share the clients: the size of the mesh's `clients`
            axis.
        chunk_size: the number of clients that a device runs at once.

    Returns:
        int64 `[clients]`: `order[k]` is the client at position k. Device d has the positions from
        `d * clients / num_devices` to `(d + 1) * clients / num_devices - 1`.

    Raises:
        ValueError: `num_steps` is not one number per client or has a negative entry; `num_devices`
            does not divide the number of clients; or a size is below 1.

    Example:
        >>> order = balanced_order([1, 9, 2, 3, 4, 5], num_devices=2)
        >>> order.tolist()  # 9 + 3 + 1 steps, 5 + 4 + 2 steps
        [1, 3, 0, 5, 4, 2]

    Reference:
        Graham. Bounds on Multiprocessing Timing Anomalies. SIAM Journal on Applied Mathematics
        17(2), 1969; here with the same number of clients on every device.
    """
    work = _check(num_steps, num_devices, chunk_size)
    per_device = len(work) // num_devices
    chunk = min(chunk_size, max(per_device, 1))
    num_chunks, remainder = divmod(per_device, chunk)
    ranked = np.argsort(-work, kind="stable")
    if num_devices == 1:
        return ranked
    load = [0.0] * num_devices
    device = np.empty(len(work), np.int64)  # of each client, from the largest to the smallest

    def assign(first: int, size: int, limit: int) -> None:
        """Assign chunks of `size` clients, the largest first, `limit` to each device."""
        heap, counts = sorted(zip(load, range(num_devices), strict=True)), [0] * num_devices
        largest = work[ranked[first : first + num_devices * limit * size : size]].tolist()
        chosen = []
        for steps in largest:
            least, d = heap[0]
            chosen.append(d)
            counts[d] += 1
            load[d] = least + steps
            if counts[d] < limit:
                heapq.heapreplace(heap, (load[d], d))
            else:
                heapq.heappop(heap)
        device[first : first + len(chosen) * size] = np.repeat(np.array(chosen, np.int64), size)

    assign(0, chunk, num_chunks)
    if remainder:  # the smallest clients form the incomplete chunks
        assign(num_devices * num_chunks * chunk, remainder, 1)
    return ranked[np.argsort(device, kind="stable")]


def idle_fraction(num_steps: ArrayLike, num_devices: int = 1, *, chunk_size: int = 1) -> float:
    """Return the fraction of the devices' time that is idle when clients run in this order.

    Args:
        num_steps: integers `[clients]`, each client's local steps, in the order of the clients.
        num_devices: the number of devices that share the clients in equal blocks.
        chunk_size: the number of clients that a device runs at once.

    Returns:
        A float from 0 to 1: the steps spent waiting for a longer client of the chunk or for another
        device, divided by all steps that the devices could run until the last one finishes. 0 if no
        client has a step.

    Raises:
        ValueError: as in `balanced_order`.

    Example:
        >>> idle_fraction([4, 1, 1, 2], num_devices=2)  # 5 and 3 steps
        0.2
        >>> idle_fraction([4, 2, 1, 1], num_devices=1, chunk_size=2)  # 2 x 4 and 2 x 1
        0.2
    """
    work = _check(num_steps, num_devices, chunk_size).reshape(num_devices, -1)
    busy = np.zeros(num_devices)
    for start in range(0, work.shape[1], chunk_size):
        chunk = work[:, start : start + chunk_size]
        busy += chunk.max(1) * chunk.shape[1]
    total = num_devices * busy.max()
    return float((total - work.sum()) / total) if total else 0.0


def _check(
    num_steps: ArrayLike, num_devices: int, chunk_size: int
) -> Float64[np.ndarray, " clients"]:
    """Check the arguments, and return the work of each client as floats."""
    work = np.asarray(num_steps, np.float64)
    if work.ndim != 1 or not np.all(work >= 0):
        raise ArgumentError(
            f"num_steps has shape {list(work.shape)}"
            + (f" and minimum {work.min()}" if work.size else "")
            + ", expected one number of at least 0 for each client."
        )
    for name, size in (("num_devices", num_devices), ("chunk_size", chunk_size)):
        if size < 1:
            raise ArgumentError(f"{name} is {size}, expected at least 1.")
    if len(work) % num_devices:
        below = len(work) - len(work) % num_devices
        raise ArgumentError(
            f"num_devices={num_devices} does not divide the number of clients, {len(work)}: take "
            f"{below} or {below + num_devices} clients, or fewer devices."
        )
    return work
