"""Streamed text: whole characters, decided stop strings, and the same text however it was cut into tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from mmsdk.generate.text import TextStream


def byte_level() -> Tokenizer:
    """One token a byte, as GPT-2 spells bytes: the hardest cut there is."""
    alphabet = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_to_unicode() -> dict[int, str]:
    """The byte alphabet as GPT-2's encoder.py defines it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTES = byte_level()


def decode(ids: Sequence[int]) -> str:
    return BYTES.decode(list(ids), skip_special_tokens=True)


def pieces(ids: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    stream = TextStream(decode, stops)
    return [*(stream.push(token) for token in ids), stream.finish()]


def whole(ids: Sequence[int], stops: Sequence[str] = ()) -> str:
    return "".join(pieces(ids, stops))


def reference(text: str, stops: Sequence[str]) -> str:
    """Character by character: the first moment at which the text ends with a stop string, the longest one then."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


def test_a_character_comes_when_its_last_byte_does() -> None:
    assert pieces("a😀é".encode()) == ["a", "", "", "", "😀", "", "é", ""]


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_any_text_comes_out_as_it_went_in_byte_by_byte(text: str) -> None:
    streamed = pieces(text.encode())
    assert "".join(streamed) == text
    assert all("\ufffd" not in piece for piece in streamed)


@settings(deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_end_and_valid_ones_are_not_lost(data: bytes) -> None:
    expected = data.decode("utf-8", errors="replace")
    streamed = whole(data)
    # Only replacement characters at the very end may be fewer.
    assert streamed.rstrip("\ufffd") == expected.rstrip("\ufffd")
    assert streamed.endswith("\ufffd") == expected.endswith("\ufffd")


def test_invalid_bytes_without_end_do_not_hold_the_stream() -> None:
    streamed = pieces([0x80] * 50 + list(b"ok"))
    assert "".join(streamed) == "\ufffd" * 50 + "ok"
    assert sum(len(piece) for piece in streamed[:50]) == 47


@settings(deadline=None)
@given(st.text("abé\n", max_size=12), st.lists(st.text("abé\n", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_where_tokens_end(text: str, stops: list[str]) -> None:
    assert whole(text.encode(), stops) == reference(text, stops)


@settings(deadline=None)
@given(st.data())
def test_stop_strings_inside_long_tokens(data: st.DataObject) -> None:
    words = data.draw(st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=5))
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=3), max_size=3))
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), stops)
    text = "".join([*(stream.push(i) for i in range(len(words))), stream.finish()])
    assert text == reference("".join(words), stops)


def test_nothing_of_a_stop_string_is_shown_before_it_is_certain() -> None:
    assert pieces(b"say END", ["END"]) == ["s", "a", "y", " ", "", "", "", ""]


def test_text_held_for_a_stop_string_that_never_comes_is_released_at_the_end() -> None:
    assert pieces(b"the EN", ["END"]) == ["t", "h", "e", " ", "", "", "EN"]


def test_after_a_stop_string_nothing_comes() -> None:
    stream = TextStream(decode, ["b"])
    assert [stream.push(token) for token in b"abc"] == ["a", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like vocabulary in the way of Llama 2: bytes where no piece fits, a leading space that decoding strips."""
    pieces_ = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "!", "▁▁"]
    tokenizer = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces_)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize(
    "spelled",
    [
        ["▁Hello", "▁world", "!"],
        ["<s>", "▁Hello", "</s>", "▁world"],
        ["<s>", "<s>", "▁Hello"],
        ["▁Hello", "▁▁", "▁world", "▁"],
        ["▁Hello", "▁", *(f"<0x{byte:02X}>" for byte in "€😀".encode()), "▁world"],
    ],
)
def test_a_sentencepiece_stream_equals_its_full_decode(spelled: list[str]) -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_to_id(piece) for piece in spelled]
    stream = TextStream(lambda part: tokenizer.decode(list(part), skip_special_tokens=True))
    streamed = [*(stream.push(token) for token in ids), stream.finish()]
    assert "".join(streamed) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in streamed)


def test_half_a_character_at_the_end_is_one_replacement_with_byte_fallback_too() -> None:
    tokenizer = byte_fallback()
    stream = TextStream(lambda part: tokenizer.decode(list(part), skip_special_tokens=True))
    ids = [tokenizer.token_to_id("▁Hello"), *(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()[:3])]
    assert "".join([*(stream.push(token) for token in ids), stream.finish()]) == "Hello\ufffd"
