"""Lines of JSON from processes that may be strangers."""

from fedpax.processes.json_line_socket import parse_line, printable


def test_only_a_json_object_is_a_message():
    assert parse_line(b'{"beat": true}') == {"beat": True}
    assert parse_line(b"GET /") is None
    assert parse_line(b"[" * 100_000) is None  # deeply nested


def test_names_have_no_control_characters():
    assert printable("host1\x1b[2J") == "host1\\x1b[2J"
