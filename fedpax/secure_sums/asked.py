"""The digest of what sites are asked, to which the masks of a secure sum are bound."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedpax.secure_sums.roster import PROTOCOL


class AskedStages:
    """The digests of the stages of a round, each of them of the earlier stages too.

    Values of a later stage depend on what an earlier one was asked for.

    Args:
        of_one: the fields that differ between sites, which are left out.
    """

    def __init__(self, of_one: frozenset[str]) -> None:
        self._of_one, self.token = of_one, ""  # of the last stage
        self._stages: dict[int, str] = {}

    def add(
        self, token: str, stage: int, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> bytes:
        """Return the digest of a stage: of JSON fields, and of arrays that all sites have."""
        known = self._stages if token == self.token else {}
        known = {number: digest for number, digest in known.items() if number < stage}
        fields = {name: x for name, x in header.items() if name not in self._of_one}
        fields = json.loads(json.dumps(fields))  # as messages have them: names are texts
        types = {name: [str(x.dtype), list(x.shape)] for name, x in sorted(arrays.items())}
        content = json.dumps([token, known, fields, types], sort_keys=True)
        asked = hashlib.sha256(PROTOCOL + b"asked" + content.encode())
        for name in types:
            asked.update(np.ascontiguousarray(arrays[name]).tobytes())
        self.token, self._stages = token, {**known, stage: asked.hexdigest()}
        return asked.digest()
