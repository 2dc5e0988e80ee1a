"""Text that users type is text: no marker in it becomes a special token, whatever the vocabulary."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from mmsdk.errors import ModelError
from mmsdk.tokenizer import TextTokenizer


def word_vocabulary() -> Tokenizer:
    """Markers that ordinary tokenisation reaches: by a merge, by a unit of the vocabulary, and by an unflagged added token."""
    alphabet = ["<", "s", ">", "/", "i", "m", "g", "a", " "]
    vocabulary = {token: place for place, token in enumerate([*alphabet, "<s", "<s>", "<img>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("<", "s"), ("<s", ">")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken("<img>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("text", ["<s>", "a<s>a", "<s><s>", "<img>", "<<img>>", "a <img> <s>"])
def test_markers_are_broken_up_into_their_characters(text: str) -> None:
    tokenizer = TextTokenizer(word_vocabulary(), markers=("<img>",))
    ids = tokenizer.encode(text)
    assert not {tokenizer.special("<s>"), tokenizer.special("<img>")} & set(ids)
    assert tokenizer.decode(ids) == text


def test_what_the_backend_is_set_to_later_makes_no_difference() -> None:
    backend = word_vocabulary()
    tokenizer = TextTokenizer(backend)
    before = tokenizer.encode("a<s>" * 10)
    backend.enable_truncation(2)
    backend.enable_padding(length=100)
    backend.encode_special_tokens = False
    assert tokenizer.encode("a<s>" * 10) == before


def test_an_unknown_special_token_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="<video>"):
        TextTokenizer(word_vocabulary()).special("<video>")


def test_threads_get_what_they_would_get_alone() -> None:
    tokenizer = TextTokenizer(word_vocabulary())
    texts = ["a" * n + "<s>" * (n % 3) for n in range(200)]
    alone = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == alone


def test_the_bytes_of_tokens_are_told_one_by_one() -> None:
    """Of a vocabulary with a token for each byte, as SentencePiece's are, whose first word is decoded without its space."""
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, "a": 4, **{f"<0x{byte:02X}>": 5 + byte for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<s>"])
    tokenizer = TextTokenizer(backend)
    ids = [1, 2, *(5 + byte for byte in "🦊".encode()), 1, tokenizer.special("<s>")]
    spelled = [tokenizer.spelled(one) for one in ids]
    assert spelled == [b" a", b"b", b"\xf0", b"\x9f", b"\xa6", b"\x8a", b" a", b""]
    assert b"".join(spelled).decode().removeprefix(" ") == tokenizer.decode(ids)
