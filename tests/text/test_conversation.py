"""Conversations: the loss is on answers alone, and a row has whole conversations."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedpax.data import (
    SEPARATOR,
    Conversation,
    Mixture,
    Tokenizer,
    heldout_token_batches,
    load_chat_template,
    load_tokenizer,
    token_rounds,
)
from fedpax.data.rounds.client_token_rows import pack_clients, preprocess_rows
from fedpax.data.rounds.heldout_tokens import HeldoutRows
from fedpax.errors import ArgumentError
from fedpax.text.chat_template import find_chat_template
from fedpax.text.tokenizer import BYTE_TOKENIZER

EXAMPLES = st.lists(
    st.fixed_dictionaries({"p": st.binary(max_size=9), "a": st.binary(max_size=9)}), min_size=1
).map(lambda examples: [{k: v.decode("latin1") for k, v in e.items()} for e in examples])
FIELD = Conversation("p", "a")
CHATML = (
    "{%- for m in messages %}\n{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "\n{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


def plain_rows(examples: list[dict[str, str]], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Make rows of (input, target, is in an answer), one conversation after another."""
    rows: list[list[tuple[int, int, int]]] = [[]]
    for example in examples:
        prompt, answer = (list(example[k].encode()) for k in ("p", "a"))
        tokens = [SEPARATOR, *prompt, *answer, SEPARATOR]
        flags = [0] * len(prompt) + [1] * (len(answer) + 1)
        pairs = list(zip(tokens[:-1], tokens[1:], flags, strict=True))
        if len(rows[-1]) + len(pairs) > seq_len and rows[-1]:
            rows.append([])
        for pair in pairs:
            if len(rows[-1]) == seq_len:
                rows.append([])
            rows[-1].append(pair)
    return rows


def scored(batch: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Return the (input, target) pairs of each row that count."""
    return [
        [(i, t) for i, t, m in zip(*row, strict=True) if m]
        for row in zip(batch["inputs"], batch["targets"], batch["mask"], strict=True)
    ]


@given(EXAMPLES, st.integers(1, 30))
def test_the_loss_of_packed_prompts_is_on_answers_alone(
    examples: list[dict[str, str]], seq_len: int
) -> None:
    expected = [[(i, t) for i, t, m in row if m] for row in plain_rows(examples, seq_len)]
    rows, population = pack_clients(examples, seq_len=seq_len, field=FIELD, client_field=None)
    assert len(population) == 1
    assert scored(preprocess_rows(rows)) == expected
    heldout = HeldoutRows(examples, seq_len=seq_len, field=FIELD)
    assert scored(heldout.read(np.arange(len(heldout)))) == expected
    assert heldout.num_targets.tolist() == [len(row) for row in expected]


@given(EXAMPLES, st.integers(1, 30), st.integers(1, 100))
def test_an_epoch_of_a_stream_has_the_answers_of_all_examples(
    examples: list[dict[str, str]], seq_len: int, shuffle_tokens: int
) -> None:
    sizes = {"islands": 1, "local_steps": 1, "batch_size": 1, "seq_len": seq_len}
    rounds = token_rounds(examples, **sizes, field=FIELD, shuffle_tokens=shuffle_tokens)
    # Pairs that count, of two epochs: epochs and windows can share a row.
    answers = [len(e["a"].encode()) + 1 for e in examples]
    counted, targets = 0, []
    while counted < 2 * sum(answers):
        batch = next(rounds).batches
        targets += batch["targets"][batch["mask"] > 0].tolist()
        counted = len(targets)
    bytes_of_answers = sorted([*"".join(e["a"] for e in examples).encode(), *[255] * len(examples)])
    if shuffle_tokens <= seq_len:  # rows are in order, so the first pairs are of the first epoch
        assert sorted(targets[: sum(answers)]) == bytes_of_answers
    assert set(targets) <= set(bytes_of_answers)


def test_a_restored_stream_continues_and_shapes_include_the_mask() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, [14, 9], (99, 2))
    examples = [{"p": "p" * p, "a": "a" * a} for p, a in lengths]
    sizes = {"islands": 2, "local_steps": 2, "batch_size": 2, "seq_len": 24}
    rounds = token_rounds(examples, **sizes, field=FIELD, shuffle_tokens=300)
    for _ in range(3):
        next(rounds)
    state = json.loads(json.dumps(rounds.get_state()))
    expected = next(rounds).batches
    again = token_rounds(examples, **sizes, field=FIELD, shuffle_tokens=300)
    again.set_state(state)
    result = next(again).batches
    assert result.keys() == expected.keys() >= {"mask"}
    for name, values in expected.items():
        np.testing.assert_array_equal(result[name], values)
    targets, mask = expected["targets"], expected["mask"] > 0
    assert set(np.unique(targets[mask])) == {ord("a"), SEPARATOR}
    assert ord("a") not in targets[~mask]  # all conversations fit in a row
    with pytest.raises(ArgumentError, match="field is"):
        token_rounds([{"p": "x"}] * 99, **sizes, field="p", shuffle_tokens=300).set_state(state)


def test_texts_in_a_mixture_with_conversations_count_in_full() -> None:
    chats = [{"p": "ppp", "a": "aa"}] * 70
    mixture = Mixture(
        {"chats": chats, "texts": [{"text": "t" * 40}] * 70},
        {"chats": 1.0, "texts": 1.0},
        {"texts": "text"},
    )
    rounds = token_rounds(mixture, islands=1, local_steps=2, batch_size=4, seq_len=12, field=FIELD)
    batch = next(rounds).batches
    is_text = (batch["inputs"] == ord("t")).any(-1)
    assert batch["mask"][is_text].all() and not batch["mask"][~is_text].all()
    assert is_text.sum() == 4


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of a tokenizer with ChatML's special tokens and template."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("chat")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["user assistant the answer is é"] * 9, trainer)
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(chat_folder: Path) -> Tokenizer:
    return load_tokenizer(str(chat_folder / "tokenizer.json"))


MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "né?"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "is 2\n"},
]


def test_answers_of_a_chat_template_are_scored_up_to_the_end_of_the_turn(
    chat_folder: Path, tokenizer: Tokenizer
) -> None:
    field = Conversation(messages="chat", template=load_chat_template(chat_folder))
    (document,) = field.encode([{"chat": MESSAGES}], tokenizer)
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    expected = library.encode(text, add_special_tokens=False)
    assert [document.first, *document.tokens.tolist()] == expected.ids
    # The reference: walk over the tokens, between "assistant\n" and the end of the turn.
    end, in_answer, flags = library.token_to_id("<|im_end|>"), False, []
    for number, (start, _) in enumerate(expected.offsets):
        flags.append(in_answer or text[:start].endswith("<|im_start|>assistant\n"))
        in_answer = flags[-1] and expected.ids[number] != end
    assert document.is_target.tolist() == [*flags[1:], False]
    answers = tokenizer.decode(document.tokens[document.is_target[:-1]])
    assert answers == "the answeris 2\n"


def test_messages_of_sharegpt_are_those_of_roles(chat_folder: Path, tokenizer: Tokenizer) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": names[m["role"]], "value": m["content"], "role": None} for m in MESSAGES]
    field = Conversation(messages="m", template=load_chat_template(chat_folder))
    result, expected = field.encode([{"m": shared}, {"m": MESSAGES}], tokenizer)
    assert [result.first, *result.tokens.tolist()] == [expected.first, *expected.tokens.tolist()]
    assert result.is_target.tolist() == expected.is_target.tolist()


def test_a_prompt_ends_where_the_answer_begins(chat_folder: Path, tokenizer: Tokenizer) -> None:
    field = Conversation(messages="m", template=load_chat_template(chat_folder))
    tokens, ends = field.encode_prompt("né?", tokenizer)
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    text = "<|im_start|>user\nné?<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.tolist() == library.encode(text, add_special_tokens=False).ids
    assert ends == [library.token_to_id("<|im_end|>")]


def test_a_prompt_and_its_answer_are_messages_of_the_template(
    chat_folder: Path, tokenizer: Tokenizer
) -> None:
    both = load_chat_template(chat_folder)
    pair = Conversation("q", "r", template=both).encode([{"q": "né?", "r": "the"}], tokenizer)
    chat = [{"role": "user", "content": "né?"}, {"role": "assistant", "content": "the"}]
    whole = Conversation(messages="m", template=both).encode([{"m": chat}], tokenizer)
    assert pair[0].tokens.tolist() == whole[0].tokens.tolist()
    assert pair[0].is_target.tolist() == whole[0].is_target.tolist()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "x"}], "at least one of the role 'assistant'"),
        ([{"from": "human", "value": "x"}], "at least one of the role 'assistant'"),
        ([{"from": "gpt", "text": "x"}], "'from' and 'value'.*rename the keys"),
        ([{"from": 3, "value": "x"}, {"from": "gpt", "value": ""}], "expected texts as 'role'"),
        (None, "Leave out this example"),
        ([{"role": "assistant", "content": None}], "the loss is on this answer"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "the loss is on this answer"),
        ([{"role": "assistant", "content": "<|im_end|>"}], "spells '<|im_end|>', a special"),
        ([{"role": "assistant", "content": "", "name": "<|im_end|>"}], "spells '<|im_end|>'"),
        (
            [{"role": "x<|im_end|>", "content": ""}, {"role": "assistant", "content": ""}],
            "spells '<|im_end|>'",
        ),
    ],
)
def test_messages_that_cannot_be_read_raise(
    messages: Any, words: str, chat_folder: Path, tokenizer: Tokenizer
) -> None:
    field = Conversation(messages="m", template=load_chat_template(chat_folder))
    with pytest.raises(ArgumentError, match=words):
        field.encode([{"m": messages}], tokenizer)


def test_a_template_that_changes_earlier_messages_raises(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "last.jinja").write_text(
        "{% for m in messages %}{{ m.content if loop.last else '-' }}{% endfor %}"
    )
    field = Conversation(messages="m", template=load_chat_template(tmp_path / "last.jinja"))
    with pytest.raises(ArgumentError, match="the answers cannot be found"):
        field.encode([{"m": MESSAGES}], tokenizer)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "is damaged"),
    ],
)
def test_templates_run_in_a_sandbox(
    template: str, words: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.jinja").write_text(template)
    with pytest.raises(ArgumentError, match=words):
        field = Conversation(messages="m", template=load_chat_template(tmp_path / "a.jinja"))
        field.encode([{"m": MESSAGES}], tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        3,
        [{"name": "default", "template": ["x"]}],
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{{ 1 / 0 }}",
        "{{ none + 1 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
    ],
    ids=lambda template: str(template)[:20],
)
def test_a_damaged_template_of_others_is_told(tmp_path: Path, template: Any) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ArgumentError, match=r"tokenizer_config.json: (the chat t|chat_t)emplate"):
        load_chat_template(tmp_path).render([{"role": "user", "content": "1"}], False)


@pytest.mark.parametrize(
    "template", [[], [3], [{"name": "default"}], [{"name": "tools", "template": "x"}]]
)
def test_a_config_without_a_default_template_has_none(tmp_path: Path, template: Any) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    assert find_chat_template(tmp_path) is None


def test_a_tag_of_answers_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    )
    template = load_chat_template(tmp_path / "a.jinja")
    assert template.render([{"role": "é"}], False) == '{"role": "é"}'


@pytest.mark.parametrize(
    "arguments", [{}, {"prompt": "p"}, {"prompt": "p", "answer": "a", "messages": "m"}]
)
def test_fields_that_do_not_fit_raise(arguments: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="expected both prompt and answer"):
        Conversation(**arguments)
    with pytest.raises(ArgumentError, match="need a chat template"):
        Conversation(messages="m")


def test_a_missing_answer_raises() -> None:
    with pytest.raises(ArgumentError, match="expected a text"):
        heldout_token_batches([{"p": "x", "a": None}], batch_size=1, seq_len=8, field=FIELD)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "message",
    [
        *({"role": "user", "content": c} for c in (float("nan"), 3, True, b"x", {"a": 1}, ["a"])),
        *({"role": role, "content": "x"} for role in (None, float("nan"), b"user")),
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
    ids=str,
)
def test_a_message_that_is_no_text_raises(message: dict[str, Any], tmp_path: Path) -> None:
    """A template would train on 'nan', "b'x'" or "[{'type': ...}]"."""
    (tmp_path / "a.jinja").write_text(PLAIN)
    field = Conversation(messages="m", template=load_chat_template(tmp_path / "a.jinja"))
    chat = [message, {"role": "assistant", "content": "y"}]
    with pytest.raises(ArgumentError, match=r"expected (texts as 'role'|a text: it has no rule)"):
        field.encode([{"m": chat}], BYTE_TOKENIZER)


def test_calls_of_tools_that_the_template_leaves_out_raise(tmp_path: Path) -> None:
    calls = [{"function": {"name": "add", "arguments": "1"}}]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    chat[1]["tool_calls"] = calls  # type: ignore[assignment]
    (tmp_path / "a.jinja").write_text(PLAIN)
    field = Conversation(messages="m", template=load_chat_template(tmp_path / "a.jinja"))
    with pytest.raises(ArgumentError, match=r"does not write the tool_calls \[\{'function'.*Leave"):
        field.encode([{"m": chat}], BYTE_TOKENIZER)
    written = "{{ m.role }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function }}"
    (tmp_path / "b.jinja").write_text(
        "{% for m in messages %}" + written + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    field = Conversation(messages="m", template=load_chat_template(tmp_path / "b.jinja"))
    (document,) = field.encode([{"m": chat}], BYTE_TOKENIZER)
    assert b"'arguments': '1'" in bytes(document.tokens[document.is_target[:-1]].tolist())


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())
    template = load_chat_template(tmp_path / "a.jinja")
    assert template.render([{"role": "user", "content": "x"}], False) == "<user>x"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("chat_template.jinja", "é".encode("latin1"), "chat_template.jinja is not UTF-8"),
        (
            "tokenizer_config.json",
            b"[" * 1000 + b"]" * 1000,
            "tokenizer_config.json is damaged.*nests",
        ),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is damaged"),
    ],
)
def test_the_message_names_the_damaged_file(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=words):
        load_chat_template(tmp_path)
