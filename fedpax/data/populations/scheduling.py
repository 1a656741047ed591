"""The order in which clients of unequal size go to the devices, so that these finish together.

A device runs its clients one chunk after another, and a chunk lasts as long as its longest client.
So clients of like size share a chunk, and chunks are given out by longest processing time first.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def balanced_order(steps: ArrayLike, devices: int = 1, *, chunk_size: int = 1) -> NDArray[np.int64]:
    """Orders clients so that devices which take equal blocks of them finish together.

    Sorted by size, the clients are cut into chunks of `chunk_size`, and each chunk, the
    largest first, goes to the device with the least work so far among those that have room. All
    devices get as many clients, as a sharded axis needs, each its largest first.

    Args:
        steps: integers [clients], each client's local steps, or any other measure of its work.
        devices: how many devices share the clients: the size of the mesh's `clients` axis.
        chunk_size: how many clients a device runs at once.

    Returns:
        int64 [clients]: `order[k]` is the client that stands at place k; device d holds the places
        `d * clients / devices` and following.

    Raises:
        ValueError: steps are not one number a client, or negative; `devices` does not divide the
            number of clients, or a size is below 1.

    Example:
        >>> order = balanced_order([1, 9, 2, 3, 4, 5], devices=2)
        >>> order.tolist()  # 9 + 3 + 1 steps, 5 + 4 + 2 steps
        [1, 3, 0, 5, 4, 2]

    Reference:
        Graham. Bounds on Multiprocessing Timing Anomalies. SIAM Journal on Applied Mathematics
        17(2), 1969; with as many clients on every device.
    """
    work = _check(steps, devices, chunk_size)
    each = len(work) // devices
    chunk = min(chunk_size, max(each, 1))
    full, rest = divmod(each, chunk)
    ranked = np.argsort(-work, kind="stable")
    held: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]
    load = np.zeros(devices)

    def deal(chunks: NDArray[np.int64], room: int) -> None:
        """Gives out chunks [number, clients], the longest first, at most `room` to a device."""
        taken = np.zeros(devices, np.int64)
        for clients in chunks:
            d = int(np.argmin(np.where(taken < room, load, np.inf)))
            held[d].append(clients)
            taken[d] += 1
            load[d] += work[clients[0]]

    deal(ranked[: devices * full * chunk].reshape(-1, chunk), full)
    if rest:  # what fills no chunk is the smallest clients
        deal(ranked[devices * full * chunk :].reshape(devices, rest), 1)
    return np.concatenate([clients for chunks in held for clients in chunks] or [ranked])


def wasted_steps(steps: ArrayLike, devices: int = 1, *, chunk_size: int = 1) -> float:
    """The share of the devices' time in which clients in this order leave them idle.

    Args:
        steps: integers [clients], each client's local steps, in the order in which they stand.
        devices: how many devices hold equal blocks of them.
        chunk_size: how many clients a device runs at once.

    Returns:
        From 0 to 1: the steps that are waited for in a chunk or for another device, over all that
        the devices could take until the last has finished. 0 where nobody takes a step.

    Raises:
        ValueError: as `balanced_order`.

    Example:
        >>> wasted_steps([4, 1, 1, 2], devices=2)  # 5 and 3 steps
        0.2
        >>> wasted_steps([4, 2, 1, 1], devices=1, chunk_size=2)  # 2 x 4 and 2 x 1
        0.2
    """
    work = _check(steps, devices, chunk_size).reshape(devices, -1)
    taken = np.zeros(devices)
    for start in range(0, work.shape[1], chunk_size):
        chunk = work[:, start : start + chunk_size]
        taken += chunk.max(1) * chunk.shape[1]
    possible = devices * taken.max()
    return float((possible - work.sum()) / possible) if possible else 0.0


def _check(steps: ArrayLike, devices: int, chunk_size: int) -> NDArray[np.float64]:
    work = np.asarray(steps, np.float64)
    if work.ndim != 1 or not np.all(work >= 0):
        raise ValueError(
            f"steps has shape {list(work.shape)}"
            + (f" and a least value of {work.min()}" if work.size else "")
            + ", expected one number of at least 0 for each client."
        )
    for name, size in (("devices", devices), ("chunk_size", chunk_size)):
        if size < 1:
            raise ValueError(f"{name} is {size}, but must be at least 1.")
    if len(work) % devices:
        below = len(work) - len(work) % devices
        raise ValueError(
            f"{len(work)} clients cannot be shared by {devices} devices in equal blocks: take "
            f"{below} or {below + devices} clients, or fewer devices."
        )
    return work
