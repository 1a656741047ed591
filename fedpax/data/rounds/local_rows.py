"""Rows of a round: which of them a process needs, and arrays of these rows alone."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Num

RowMask = Bool[np.ndarray, "islands local_steps batch_size"]
"""True for the rows that a process makes."""


class LocalRows:
    """A global array `[islands, steps, batch, ...]` of which this process has some rows.

    It has a shape and a dtype, and can be indexed with slices, so that
    `jax.make_array_from_callback` makes the global array from it.

    Args:
        rows: the rows that this process has, `[local rows, ...]`, in the order of the global array.
        mask: which rows of the global array they are.

    Example:
        >>> mask = np.array([[[True, False, True]]])
        >>> array = LocalRows(np.array([[1, 2], [5, 6]]), mask)
        >>> array.shape, array[:, :, 2:3].tolist()
        ((1, 1, 3, 2), [[[[5, 6]]]])
        >>> array[:, :, 1:]
        Traceback (most recent call last):
            ...
        IndexError: This process has 2 of the 3 rows of the array ...
    """

    def __init__(self, rows: Num[np.ndarray, "rows ..."], mask: RowMask) -> None:
        self._rows = rows
        self._places = np.where(mask, np.cumsum(mask).reshape(mask.shape) - 1, -1)
        self.shape = (*mask.shape, *rows.shape[1:])
        self.dtype = rows.dtype

    def __getitem__(self, index: Any) -> Num[np.ndarray, "..."]:
        """Return a block of the global array, all of whose rows this process has."""
        index = index if isinstance(index, tuple) else (index,)
        places = self._places[index[:3]]
        if np.any(places < 0):
            raise IndexError(
                f"This process has {len(self._rows)} of the {self._places.size} rows of the array "
                f"{list(self.shape)}, but not all in {index}: index only rows of its own devices."
            )
        return self._rows[places][(slice(None),) * places.ndim + index[3:]]


def addressable_rows(
    sharding: Sharding, shape: tuple[int, ...], devices: Iterable[jax.Device] | None = None
) -> RowMask:
    """Return which rows of a round the devices of this process hold.

    Args:
        sharding: the sharding of the cohort's arrays.
        shape: `(islands, local_steps, batch_size, ...)`, the shape of the arrays.
        devices: the devices. Default None: the devices of this process.

    Returns:
        bool `[islands, local_steps, batch_size]`.

    Example:
        >>> device = jax.devices()[0]
        >>> addressable_rows(jax.sharding.SingleDeviceSharding(device), (2, 1, 3, 8)).all()
        np.True_
    """
    addressable = sharding.addressable_devices if devices is None else set(devices)
    mask = np.zeros(shape[:3], np.bool_)
    for device, index in sharding.devices_indices_map(shape).items():
        if device in addressable:
            mask[index[:3]] = True
    return mask
