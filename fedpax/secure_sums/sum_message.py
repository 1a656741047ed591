"""A message of a secure sum."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Message(NamedTuple):
    """A message between the coordinator and a site, which any transport can carry."""

    header: Mapping[str, Any]  # JSON values by name
    arrays: Mapping[str, np.ndarray] = {}
