"""The message of a secure sum, and of every other exchange between processes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Message(NamedTuple):
    """A message between two processes, which any transport can carry."""

    header: Mapping[str, Any]  # JSON values by name
    # Arrays by name, of any dtype of JAX. Default {}: none. The arrays of a received message are
    # writable, and are not shared.
    arrays: Mapping[str, np.ndarray] = {}
