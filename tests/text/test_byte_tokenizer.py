import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import SEPARATOR, VOCAB_SIZE, decode, encode


@given(st.text())
def test_decoding_inverts_encoding_and_no_token_is_the_separator(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == text.encode()
    assert SEPARATOR not in tokens
    assert decode(tokens) == text


def test_the_separator_is_a_token_of_the_vocabulary() -> None:
    assert VOCAB_SIZE == 256
    assert 0 <= SEPARATOR < VOCAB_SIZE
    with pytest.raises(UnicodeDecodeError):
        bytes([SEPARATOR]).decode()


def test_decode_skips_separators_and_marks_invalid_bytes() -> None:
    tokens = np.array([[SEPARATOR, 0x61, 0xC3], [0xA9, SEPARATOR, 0xA9]], np.int32)
    assert decode(tokens) == "aé\ufffd"


def test_bytes_that_are_not_utf8_raise() -> None:
    with pytest.raises(
        ValueError, match=r"Byte 2 of a text is 0xFF.*decode it from its own encoding"
    ):
        encode(b"ab\xff")


@pytest.mark.parametrize("value", [3, None, np.zeros(3)])
def test_other_types_than_text_raise(value: object) -> None:
    with pytest.raises(TypeError, match="name the field"):
        encode(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[256], [-1, 5]])
def test_tokens_that_are_not_bytes_raise(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="vocab_size=256"):
        decode(tokens)


def test_tokens_that_are_no_integers_raise() -> None:
    assert decode(np.array([104.0, 105.0])) == "hi"
    for tokens in (np.array([104.5]), np.array([np.nan])):
        with pytest.raises(ValueError, match=r"tokens has the value (104.5|nan) \(float64\)"):
            decode(tokens)


def test_half_of_a_surrogate_pair_raises() -> None:
    with pytest.raises(ValueError, match=r"half of a surrogate pair at 2, expected Unicode"):
        encode("ab\ud800")
