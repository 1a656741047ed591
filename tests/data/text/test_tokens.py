import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import SEPARATOR, VOCABULARY, decode, encode


@given(st.text())
def test_text_comes_back_and_no_token_is_the_separator(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == text.encode()
    assert SEPARATOR not in tokens
    assert decode(tokens) == text


def test_the_separator_is_a_token_of_the_vocabulary() -> None:
    assert VOCABULARY == 256
    assert 0 <= SEPARATOR < VOCABULARY
    with pytest.raises(UnicodeDecodeError):
        bytes([SEPARATOR]).decode()


def test_decode_leaves_separators_out_and_marks_broken_characters() -> None:
    tokens = np.array([[SEPARATOR, 0x61, 0xC3], [0xA9, SEPARATOR, 0xA9]], np.int32)
    assert decode(tokens) == "aé\ufffd"


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Byte 2 of a text is 0xFF.*decode the text"):
        encode(b"ab\xff")


@pytest.mark.parametrize("value", [3, None, np.zeros(3)])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="name the field"):
        encode(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[256], [-1, 5]])
def test_what_is_no_byte_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="vocabulary must be 256"):
        decode(tokens)
