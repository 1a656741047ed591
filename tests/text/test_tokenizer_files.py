"""What a tokenizer's file and folder say besides the vocabulary: rows hold the text's tokens."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.data import Tokenizer, load_tokenizer, token_rounds, train_tokenizer

tokenizers = pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")
pieces = pytest.importorskip("tokenizers.pre_tokenizers")
decoders = pytest.importorskip("tokenizers.decoders")
normalizers = pytest.importorskip("tokenizers.normalizers")
models = pytest.importorskip("tokenizers.models")
TEXTS = [
    " Two  words, café cafe\u0301\n\tof the Text. ",
    "the text of the words",
    "<|end_of_text|> and </s>",
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "tokenizer.json"
    train_tokenizer(TEXTS * 9, vocab_size=300, path=path)
    return path


def template(library: Any) -> None:
    end = ("<|end_of_text|>", library.token_to_id("<|end_of_text|>"))
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{end[0]} $A {end[0]}", special_tokens=[end]
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "truncation": lambda t: t.enable_truncation(3),
    "padding": lambda t: t.enable_padding(length=40),
    "dropout": lambda t: setattr(t.model, "dropout", 0.9),
    "post-processor": template,
    "prefix": lambda t: setattr(t, "pre_tokenizer", pieces.ByteLevel(add_prefix_space=True)),
    "added token": lambda t: t.add_tokens(
        [tokenizers.AddedToken("zebra", lstrip=True, rstrip=True)]
    ),
    "no decoder": lambda t: None,
    **{
        f"normalizer {normalizer}": lambda t, n=normalizer: setattr(t, "normalizer", n)
        for normalizer in (
            normalizers.NFC(),
            normalizers.Lowercase(),
            normalizers.Strip(),
            normalizers.Prepend(" "),
            normalizers.Replace("words", "x"),
            normalizers.BertNormalizer(),
            normalizers.Sequence([normalizers.NFKC(), normalizers.StripAccents()]),
        )
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_file_stores_besides_the_vocabulary_changes_no_row(
    change: str, plain: Path, tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(plain))
    CHANGES[change](library)
    library.save(str(path := tmp_path / "tokenizer.json"))
    if change == "no decoder":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": None}))
    expected, tokenizer = (load_tokenizer(str(file)) for file in (plain, path))
    rows = [
        next(
            token_rounds(
                [{"text": text} for text in TEXTS],
                islands=1,
                local_steps=1,
                batch_size=2,
                seq_len=16,
                tokenizer=one,
            )
        ).batches["inputs"]
        for one in (expected, tokenizer)
    ]
    np.testing.assert_array_equal(*rows)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and tokenizer.separator not in tokens
    assert tokenizer.decode(tokenizer.encode("two  zebra  words")) == "two  zebra  words"


def llama(path: Path) -> Tokenizer:
    """Save a tokenizer as Llama 2's: bytes for unknown characters, and a space before the text."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + k for k, token in enumerate(["▁", "t", "▁t", "<s>", "</s>"])}
    library = tokenizers.Tokenizer(
        models.BPE(vocab, [("▁", "t")], byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(path))
    return load_tokenizer(str(path), end_of_document="</s>")


def test_a_character_that_stands_for_a_space_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = llama(tmp_path / "tokenizer.json")
    tokenizer.encode("t t")
    assert not caplog.text
    assert [tokenizer.decode(tokenizer.encode("a\u2581t")) for _ in range(2)] == ["a t"] * 2
    assert caplog.text.count("which this tokenizer does not give back") == 1


def test_no_space_is_added_before_a_text(tmp_path: Path) -> None:
    tokenizer = llama(tmp_path / "tokenizer.json")
    assert tokenizer.encode("t t").tolist() == [257, 258]
    for text in (*TEXTS, " t", "<s>t</s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}])
def test_a_sentencepiece_model_adds_and_removes_no_space(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 9),
        model_writer=model,
        vocab_size=320 if options else 40,
        hard_vocab_limit=False,
        model_type="unigram",
        user_defined_symbols=["<|im_end|>"],
        minloglevel=2,
        **options,
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    tokenizer = load_tokenizer(str(path), end_of_document="<|im_end|>")
    texts = [" the  text ", "of the text", "</s> and the <s>"] if not options else TEXTS
    for text in [*texts, "the text<|im_end|>"]:
        tokens = tokenizer.encode(text)
        assert tokenizer.separator not in tokens
        if options or "<" not in text:  # the small vocabulary does not have this character
            assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokenizer.encode("text"), 10_000]) == "text"  # of a larger model
    assert ("does not give back every text" in caplog.text) == (options == {})


def words(path: Path, *special: str, **vocab: int) -> Path:
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, **vocab}, unk_token="[UNK]"))
    library.pre_tokenizer = pieces.WhitespaceSplit()
    library.add_special_tokens(["[UNK]", *special])
    library.save(str(path))
    return path


@pytest.mark.parametrize("largest", [126, 65_535, 65_536, 100_000])
def test_the_vocabulary_reaches_to_the_largest_number(largest: int, tmp_path: Path) -> None:
    path = words(tmp_path / "tokenizer.json", "</s>", **{"</s>": 1, "a": 60, "b": largest})
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.vocab_size == largest + 1
    assert tokenizer.encode("b a").tolist() == [largest, 60]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}, "UNK"),
        ({"type": "Unigram", "vocab": [["</s>", 0], ["a", -1], ["b", -1]], "unk_id": None}, "unk"),
    ],
    ids=["WordLevel", "Unigram"],
)
def test_a_text_without_tokens_is_named(
    model: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = load_tokenizer(str(path), end_of_document="</s>")
    assert "does not give back every text" in caplog.text
    assert [tokens.tolist() for tokens in tokenizer.encode_all(["a", b"b"])] == [[1], [2]]
    with pytest.raises(ValueError, match=rf"^A text \('zoo'\) has characters without.*{words}"):
        tokenizer.encode_all(["a", "zoo"])


def test_added_tokens_keep_the_numbers_of_the_file(plain: Path, tmp_path: Path) -> None:
    entries = json.loads(plain.read_text())
    (end,) = entries["added_tokens"]
    entries["added_tokens"] += [end | {"content": "<|e|>", "id": 70_000}]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(entries))
    tokenizer = load_tokenizer(str(path), end_of_document="<|e|>")
    assert tokenizer.separator == 70_000 and tokenizer.vocab_size == 70_001
    for text in ("a<|e|>", "<|end_of_text|>"):
        tokens = tokenizer.encode(text)
        assert tokens.max() < 300 and tokenizer.decode(tokens) == text
    entries["added_tokens"][0]["id"] = 299  # another token's
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"added token '<\|end_of_text\|>' has id 299, expected 0"):
        load_tokenizer(str(path))


def test_text_that_spells_a_special_token_is_text(tmp_path: Path) -> None:
    path = words(tmp_path / "tokenizer.json", "</s>", **{"</s>": 1, "a": 2})
    assert load_tokenizer(str(path)).encode("a </s> a").tolist() == [2, 0, 0, 2]
    unigram = models.Unigram(
        [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "</s>a")], unk_id=0
    )
    library = tokenizers.Tokenizer(unigram)
    library.add_special_tokens(["</s>"])
    library.save(str(path))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode_all(["a</s>", b"a"])[0].tolist() == [6, 2, 3, 4, 5]


NAMES = ("<|endoftext|>", "<|im_end|>", "</s>", "<|end_of_text|>")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, "</s>"),
        ({"config.json": {"eos_token_id": 2}}, "<|im_end|>"),
        ({"tokenizer_config.json": {}, "generation_config.json": {"eos_token_id": [1, 2]}}, None),
        (
            {
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
                "config.json": {"eos_token_id": 3},
            },
            "<|im_end|>",
        ),
    ],
)
def test_the_folder_names_the_token_that_ends_a_document(
    files: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    path = words(
        tmp_path / "tokenizer.json", *NAMES, **{name: k + 1 for k, name in enumerate(NAMES)}
    )
    with pytest.raises(ValueError, match=r"does not say which token ends a document.*_of_document"):
        load_tokenizer(str(path))
    for name, entries in files.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + json.dumps(entries).encode())
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.end_of_document == (expected or NAMES[0])
    given = load_tokenizer(str(path), end_of_document="</s>")
    assert given.separator == 3 and (given.name == tokenizer.name) == (expected == "</s>")


@pytest.mark.parametrize(
    ("content", "words_of_error"),
    [
        (b'{"eos_token": "<|none|>"}', r"eos_token='<\|none\|>' is not a token of the vocabulary"),
        (b"{", r"tokenizer_config.json, which can name .*cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid", r"Git LFS pointer.*git lfs pull"),
    ],
)
def test_a_folder_that_names_no_token_raises(
    content: bytes, words_of_error: str, plain: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(plain.read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match=words_of_error):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), end_of_document="<|end_of_text|>").separator == 0
    with pytest.raises(ValueError, match="end_of_document='no' is not a token"):
        load_tokenizer(str(path), end_of_document="no")
    with pytest.raises(ValueError, match="tokenizer='bytes', expected None"):
        load_tokenizer("bytes", end_of_document="no")


@pytest.mark.parametrize("name", ["[PAD]", "<pad>", "<|padding|>", "<|right_pad_id|>", "[MASK]"])
def test_padding_does_not_end_a_document(name: str, tmp_path: Path) -> None:
    path = words(tmp_path / "tokenizer.json", name, **{name: 1, "a": 2})
    with pytest.raises(ValueError, match=r"does not say which token ends.*data\.end_of_document"):
        load_tokenizer(str(path))
    assert load_tokenizer(str(path), end_of_document=name).separator == 1
    path = words(tmp_path / "other.json", "<|padded_end|>", **{"<|padded_end|>": 1, "a": 2})
    assert load_tokenizer(str(path)).separator == 1


def test_a_git_lfs_pointer_is_called_one_and_a_byte_order_mark_is_read(
    plain: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for content in (pointer, b"\xef\xbb\xbf" + pointer):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is a Git LFS pointer.*git lfs pull"):
            load_tokenizer(str(path))
    path.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert load_tokenizer(str(path)).encode("text").size


def test_the_byte_order_mark_of_a_document_is_no_token() -> None:
    sizes: dict[str, Any] = dict(islands=1, local_steps=1, batch_size=1, seq_len=4)
    with_mark = [{"text": "\ufeffa\ufeff"}, {"text": b"\xef\xbb\xbfa\xef\xbb\xbf"}]
    rows = [
        next(token_rounds([{"text": text}], **sizes)).batches["inputs"]
        for text in ("a\ufeff", *(x["text"] for x in with_mark))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])
