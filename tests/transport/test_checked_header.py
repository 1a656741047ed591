"""The fields of a header, which are checked when they are read."""

import pytest

from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import RefusedError


def test_a_field_that_is_missing_is_refused():
    assert CheckedHeader({"kind": "push", "sequence": 4}).count("sequence") == 4
    with pytest.raises(RefusedError, match=r"'sequence' is None, expected an integer from 0 to"):
        CheckedHeader({"kind": "push"}).count("sequence")
