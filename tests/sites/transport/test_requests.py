"""The fields of a header, which are checked when they are read."""

import pytest

from fedpax.sites.transport.calls import RefusedError
from fedpax.sites.transport.requests import Request


def test_a_field_that_is_missing_is_refused():
    assert Request({"kind": "push", "sequence": 4}).count("sequence") == 4
    with pytest.raises(RefusedError, match=r"'sequence' is None, expected an integer of at least"):
        Request({"kind": "push"}).count("sequence")
