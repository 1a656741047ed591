"""The order of a cohort's clients on the devices, so that all devices finish at the same time."""

import heapq

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from fedpax.errors import ArgumentError

MOST_DELAY = 1.02
"""Clients stay with their states while the last device takes at most this times as long."""


def balanced_order(
    num_steps: ArrayLike,
    num_devices: int = 1,
    *,
    chunk_size: int = 1,
    homes: ArrayLike | None = None,
) -> Int64[np.ndarray, " clients"]:
    """Order clients so that devices with equal blocks of them finish at nearly the same time.

    Clients are sorted by size and split into chunks. Each chunk, the largest first, goes to the
    device with room that has the least work so far. All devices get the same number of clients.

    Args:
        num_steps: integers `[clients]`, each client's local steps, or any other measure of its
            work.
        num_devices: the size of the mesh's `clients` axis.
        chunk_size: the number of clients that a device runs at once.
        homes: integers `[clients]`, the device that has a client's row of a `ClientStore`
            (`fedpax.clients.home_devices`); negative: any device. Clients then go to these devices,
            or to the next ones around the ring; clients away from home are the last of a block. If
            the last device would finish more than 2% later, `homes` has no effect. Default None:
            rows do not matter.

    Returns:
        int64 `[clients]`: `order[k]` is the client at position k. Device d has the positions from
        `d * clients / num_devices` to `(d + 1) * clients / num_devices - 1`.

    Raises:
        ValueError: `num_steps` or `homes` is not one number per client, or `num_steps` has a
            negative entry; `num_devices` does not divide the number of clients; or a size is below
            1.

    Example:
        >>> order = balanced_order([1, 9, 2, 3, 4, 5], num_devices=2)
        >>> order.tolist()  # 9 + 3 + 1 steps, 5 + 4 + 2 steps
        [1, 3, 0, 5, 4, 2]

    Reference:
        Graham, SIAM Journal on Applied Mathematics 17(2), 1969; here with the same number of
        clients on every device.
    """
    work = _check(num_steps, num_devices, chunk_size)
    if homes is None or num_devices == 1:
        return _longest_first(work, num_devices, chunk_size)
    homes = np.asarray(homes, np.int64)
    if homes.shape != work.shape:
        raise ArgumentError(
            f"homes has shape {list(homes.shape)}, expected [{len(work)}]: one device for each "
            "client. Pass home_devices(client_ids, num_clients, num_devices)."
        )
    order = _homes_first(work, homes, num_devices)
    balanced = _longest_first(work, num_devices, chunk_size)
    most = MOST_DELAY * _busy(work[balanced], num_devices, chunk_size).max()
    return order if _busy(work[order], num_devices, chunk_size).max() <= most else balanced


def _homes_first(
    work: Float64[np.ndarray, " clients"], homes: Int64[np.ndarray, " clients"], num_devices: int
) -> Int64[np.ndarray, " clients"]:
    """Order clients so that few chunks' rows are sent and devices have nearly the same work."""
    per_device = len(work) // num_devices
    ranked = np.argsort(-work, kind="stable")
    at_home = [ranked[homes[ranked] == d] for d in range(num_devices)]
    is_absent = (homes < 0) & (work == 0)
    share, more = divmod(np.count_nonzero(is_absent), num_devices)
    room = per_device - share - (np.arange(num_devices) >= num_devices - more)
    # All devices send rows to the next one, around the ring, at once. So each device passes some of
    # its own clients on, and keeps the clients that come: rows then go to the next device only.
    num_passed, waiting = np.zeros(num_devices, int), 0
    for d in 2 * [*range(num_devices)]:
        waiting = max(0, waiting + len(at_home[d]) - room[d])
        num_passed[d] = waiting
    first = (int(num_passed.argmin()) + 1) % num_devices  # no client is passed to it
    device, passed = np.full(len(work), -1), np.empty(0, np.int64)
    for d in [*range(first, num_devices), *range(first)]:
        own, further = at_home[d], max(0, num_passed[d] - len(at_home[d]))
        # Clients of all sizes leave. Of the clients that came, the last ones came the farthest.
        stays = np.zeros(len(own), bool)
        number = len(own) - num_passed[d] + further
        stays[np.linspace(0, len(own) - 1, number).round().astype(int)] = True
        device[own[stays]] = device[passed[further:]] = d
        passed = np.concatenate([own[~stays], passed[:further]])
    left = per_device - np.bincount(device[device >= 0], minlength=num_devices)
    device[ranked[device[ranked] < 0]] = np.repeat(np.arange(num_devices), left)

    # The devices with the most and the least work exchange two clients, until they are close.
    loads = np.bincount(device, work, num_devices)
    for _ in range(8 * num_devices):
        most, least = loads.argmax(), loads.argmin()
        gap = (loads[most] - loads[least]) / 2
        if loads[most] <= MOST_DELAY * loads.mean():
            break
        large, small = (ranked[device[ranked] == d][::-1] for d in (most, least))
        place = np.searchsorted(work[small], work[large] - gap).clip(0, len(small) - 1)
        moved = work[large] - work[small[place]]
        best = np.abs(moved - gap).argmin()
        if not 0 < moved[best] < 2 * gap:
            break
        device[large[best]], device[small[place[best]]] = least, most
        loads[most] -= moved[best]
        loads[least] += moved[best]
    # Devices exchange rows together, in the last chunks, and those that are sent far together.
    # Absent clients follow: in the middle, they would make a device run one chunk more.
    distance = np.where(homes >= 0, (device - homes) % num_devices, num_devices * is_absent)
    return np.lexsort((-work, distance, device))


def _longest_first(
    work: Float64[np.ndarray, " clients"], num_devices: int, chunk_size: int
) -> Int64[np.ndarray, " clients"]:
    """Order clients by longest processing time first."""
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
        From 0 to 1: the steps spent waiting for a longer client of the chunk or another device, as
        a share of all steps until the last device finishes; 0 without a step.

    Raises:
        ValueError: as in `balanced_order`.

    Example:
        >>> idle_fraction([4, 1, 1, 2], num_devices=2)  # 5 and 3 steps
        0.2
    """
    work = _check(num_steps, num_devices, chunk_size)
    total = num_devices * _busy(work, num_devices, chunk_size).max()
    return float((total - work.sum()) / total) if total else 0.0


def _busy(
    work: Float64[np.ndarray, " clients"], num_devices: int, chunk_size: int
) -> Float64[np.ndarray, " devices"]:
    """Return each device's time for equal blocks of the clients."""
    blocks = work.reshape(num_devices, -1)
    busy = np.zeros(num_devices)
    for start in range(0, blocks.shape[1], chunk_size):
        chunk = blocks[:, start : start + chunk_size]
        busy += chunk.max(1) * chunk.shape[1]
    return busy


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
