"""A log that strangers cannot fill."""

import logging

import pytest

from fedpax.transport.call_limits import LimitedLog


def test_warnings_beyond_the_limit_are_counted(caplog: pytest.LogCaptureFixture):
    times = iter([0.0, 1.0, 2.0, 3.0, 11.0])
    log = LimitedLog(logging.getLogger("strangers"), most=2, clock=lambda: next(times))
    for number in range(5):
        log.warning("message %d is refused", number)
    assert caplog.messages == [
        "message 0 is refused",
        "message 1 is refused",
        "2 more warnings in 10 s were not written",
        "message 4 is refused",
    ]


def test_a_warning_that_keeps_coming_is_written_once(caplog: pytest.LogCaptureFixture):
    times = iter([0.0, 1.0, 2.0, 99.0, 198.0, 400.0])
    log = LimitedLog(logging.getLogger("x"), remember=100.0, clock=lambda: next(times))
    for words in ("a", "b", "a", "a", "a", "a"):
        log.warning("%s is refused", words)
    assert caplog.messages == ["a is refused", "b is refused", "a is refused"]
