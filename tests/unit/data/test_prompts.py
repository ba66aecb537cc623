import numpy as np
import pytest

from whet.data.prompt_stream import PromptStream, encode_all
from whet.data.prompts import PromptEncoder, find_prompt_column
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer):
    return lambda prompt: tokenizer.decode(prompt.tokens.tolist())


def test_prompt_column_is_found_in_order_of_preference():
    assert find_prompt_column(["messages", "prompts", "prompt"]) == "prompt"
    assert find_prompt_column(["messages", "prompts"]) == "prompts"
    assert find_prompt_column(["question", "messages"]) == "messages"
    assert find_prompt_column(["answer", "question"]) == "question"
    assert find_prompt_column(["q", "prompt"], "q") == "q"


@pytest.mark.parametrize(
    ("columns", "wanted", "says"),
    [
        (["promt", "a"], None, "did you mean promt?"),
        (["questions"], None, "did you mean question"),
        (["a"], "b", "columns a; name it"),
    ],
)
def test_missing_prompt_column_lists_the_columns_and_the_nearest(columns, wanted, says):
    with pytest.raises(DataError) as error:
        find_prompt_column(columns, wanted)
    assert says in str(error.value)


def test_a_row_without_a_prompt_is_named(tokenizer):
    encode = PromptEncoder(tokenizer)
    with pytest.raises(DataError, match=r"^row 0: no prompt column .* columns answer; name it in data.prompt_column$"):
        encode({"answer": 4}, 0)
    with pytest.raises(DataError, match=r"^row 3: no prompt column .* columns answer; give this row one, or leave"):
        encode({"answer": 4}, 3)


def test_plain_text_is_encoded_without_a_template(tokenizer):
    prompt = PromptEncoder(tokenizer)({"prompt": "2+2="}, 3)
    assert prompt.tokens.tolist() == [50, 43, 50, 61]
    assert prompt.tokens.dtype == np.int32 and not prompt.tokens.flags.writeable
    assert prompt.row == 3 and prompt.source == "2+2="


def test_plain_text_becomes_a_user_turn_when_asked_and_the_source_stays_text(tokenizer, text):
    encode = PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="Be brief.")
    prompt = encode({"prompt": "hi"})
    assert prompt.source == "hi"
    assert text(prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_go_through_the_template_and_the_source_stays_messages(tokenizer, text):
    prompt = PromptEncoder(tokenizer)({"messages": [{"role": "user", "content": "hi", "tool_calls": None}]})
    assert text(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.source == [{"role": "user", "content": "hi"}]  # a table's None keys are no keys


def test_a_prompt_that_ends_in_an_assistant_turn_is_continued_on_purpose(tokenizer, text):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]
    encode = PromptEncoder(tokenizer, on_answered="continue")
    assert text(encode({"prompt": turns})).endswith("<|im_start|>assistant\nIt is")


def test_a_prompt_that_holds_its_answer_is_refused_with_two_ways_on(tokenizer, text):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]
    with pytest.raises(DataError, match=r"^row 3 ends with the assistant's turn .* an answer, where a prompt") as error:
        PromptEncoder(tokenizer)({"messages": turns}, 3)
    assert "data.on_answered=take_off" in str(error.value) and "data.on_answered=continue" in str(error.value)
    encode = PromptEncoder(tokenizer, on_answered="take_off")
    taken, kept = encode({"messages": turns, "id": 1}), encode({"messages": turns, "answer": "four"})
    assert taken.columns == {"answer": "4", "id": 1} and taken.source == turns[:1]
    assert text(taken) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert kept.columns == {"answer": "four"}  # the row's own
    going_on = PromptEncoder(tokenizer, on_answered="continue")({"messages": turns})
    assert text(going_on).endswith("<|im_start|>assistant\n4")
    share_gpt = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    found = encode({"conversations": share_gpt, "id": 1})
    assert (found.source, found.columns) == (
        taken.source,
        taken.columns,
    ) and found.tokens.tolist() == taken.tokens.tolist()
    with pytest.raises(DataError, match=r"row 3 ends with the assistant's turn '4'.*data\.on_answered=take_off"):
        PromptEncoder(tokenizer)({"conversations": share_gpt}, 3)
    with pytest.raises(DataError, match="only an assistant's turn"):
        encode({"messages": turns[1:]})


def test_a_row_keeps_its_own_system_turn(tokenizer, text):
    encode = PromptEncoder(tokenizer, system_prompt="A")
    own = [{"role": "system", "content": "B"}, {"role": "user", "content": "c"}]
    assert text(encode({"prompt": own})).startswith("<|im_start|>system\nB<")
    assert text(encode({"prompt": own[1:]})).startswith("<|im_start|>system\nA<")
    assert text(PromptEncoder(tokenizer, system_prompt="")({"prompt": own[1:]})).startswith("<|im_start|>user")


def test_template_arguments_arrive_and_thinking_is_off_unless_asked():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ enable_thinking }} {{ level }}"
    row = {"prompt": [{"role": "user", "content": "x"}]}
    assert bytes(PromptEncoder(tokenizer, chat_template_kwargs={"level": 3})(row).tokens.tolist()) == b"xFalse 3"
    assert (
        bytes(PromptEncoder(tokenizer, chat_template_kwargs={"enable_thinking": True})(row).tokens.tolist())
        == b"xTrue "
    )


def test_other_columns_travel_untouched(tokenizer):
    grid, options = np.arange(4).reshape(2, 2), ["a", ["b"]]
    prompt = PromptEncoder(tokenizer)({"prompts": "x", "grid": grid, "options": options, "n": 2})
    assert set(prompt.columns) == {"grid", "options", "n"}
    assert prompt.columns["grid"] is grid and prompt.columns["options"] is options


def test_long_prompts_error_names_row_length_limit_and_fix(tokenizer):
    with pytest.raises(
        DataError, match=r"row 5: .* 4 tokens, over max_prompt_length 3; raise it to 4.*truncate_left or drop"
    ):
        PromptEncoder(tokenizer, max_prompt_length=3)({"prompt": "abcd"}, 5)


def test_long_prompts_truncate_left_keeps_the_end_and_counts(tokenizer):
    encode = PromptEncoder(tokenizer, max_prompt_length=3, on_long_prompt="truncate_left")
    prompts = [encode(row, place) for place, row in enumerate([{"prompt": "abcd"}, {"prompt": "abc"}])]
    assert [bytes(p.tokens.tolist()) for p in prompts] == [b"bcd", b"abc"]
    assert encode.counts == {"encoded": 2, "dropped": 0, "truncated": 1, "changed": 0}


def test_long_prompts_drop_keeps_the_row_numbers_of_the_others(tokenizer):
    encode = PromptEncoder(tokenizer, max_prompt_length=3, on_long_prompt="drop")
    long, short = (encode(row, place) for place, row in enumerate([{"prompt": "abcd"}, {"prompt": "abc"}]))
    assert long is None and short.row == 1
    assert encode.counts == {"encoded": 1, "dropped": 1, "truncated": 0, "changed": 0}


def test_all_rows_are_looked_at_before_those_over_the_limit_are_one_error(tokenizer):
    rows = [{"prompt": "x" * n} for n in (*[2] * 18, 9, 12)]
    encode = PromptEncoder(tokenizer, max_prompt_length=8)
    with pytest.raises(DataError) as error:
        PromptStream(rows, batch_size=2, encode=encode)
    assert str(error.value) == (
        "2 of 20 rows are over max_prompt_length 8: the longest has 12 tokens, 95 % of all rows have 12 or fewer; "
        "raise it to 12, or set on_long_prompt to truncate_left or drop"
    )
    dropping = PromptEncoder(tokenizer, max_prompt_length=8, on_long_prompt="drop")
    made = encode_all(rows, dropping)
    assert (
        len(made) == 18
        and dropping.describe_over_limit().startswith("2 of 20 rows")
        and "2 left out" in dropping.describe_counts()
    )
    assert encode_all(made, PromptEncoder(tokenizer)) == made  # what is encoded is taken as it is


@pytest.mark.parametrize("template", [False, True])
def test_rows_encoded_together_are_those_encoded_one_by_one(tokenizer, template):
    turns = [{"role": "user", "content": "<think> a"}]
    rows = [{"prompt": p, "n": n} for n, p in enumerate(["2+2=", turns, "äé", " x ", "abcdefghijkl" * 9])]
    options = {"apply_chat_template": template, "max_prompt_length": 90, "on_long_prompt": "drop"}
    alone, together = (PromptEncoder(tokenizer, **options) for _ in range(2))
    wanted = [alone(row, place) for place, row in enumerate(rows, 7)]
    found = together.encode_batch([*rows, wanted[0]], 7)
    assert found[-1] is wanted[0] and wanted[-1] is None and together.counts == alone.counts
    for a, b in zip(wanted, found[:-1], strict=True):
        told = [None if p is None else (p.tokens.tolist(), p.source, p.columns, p.row) for p in (a, b)]
        assert told[0] == told[1]


@pytest.mark.parametrize(("template", "renderings"), [(False, 0), (True, 2)])  # one more for the stand-ins
def test_the_tokenizer_is_called_once_for_a_stretch_of_rows(tokenizer, monkeypatch, template, renderings):
    calls = {"__call__": [], "apply_chat_template": []}
    for name, seen in calls.items():
        method = getattr(type(tokenizer), name)
        monkeypatch.setattr(type(tokenizer), name, lambda *a, m=method, s=seen, **o: s.append(1) or m(*a, **o))
    encode = PromptEncoder(tokenizer, apply_chat_template=template)
    assert len(encode_all([{"prompt": str(n)} for n in range(100)], encode)) == 100
    assert [len(seen) for seen in calls.values()] == [1, renderings]


def test_of_rows_encoded_together_the_first_that_is_wrong_is_the_error(tokenizer):
    with pytest.raises(DataError, match=r"row 1: .* no tokens"):
        PromptEncoder(tokenizer).encode_batch([{"prompt": "a"}, {"prompt": ""}, {"question": 1}])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "has no tokens"),
        ({"prompt": None}, "NoneType None; a prompt is a text or a list of messages"),
        ({"prompt": []}, "a prompt is a text or a list of messages"),
        ({"prompt": 3}, "int 3"),
        ({"prompt": [{"role": "user"}]}, "message 0: .* has a role and a content"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "parts image; whet trains on text only"),
        ({"prompt": "x", "image": object()}, "'image' column; whet trains on text only"),
        ({"prompt": "x", "completions": 1}, "'completions' has the name of an argument"),
        ("prompt", "row 0 is str"),
    ],
)
def test_rows_that_are_no_prompts_are_refused(tokenizer, row, says):
    with pytest.raises(DataError, match=says):
        PromptEncoder(tokenizer)(row)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([{"role": "user", "content": None}], "row 4, message 0: role 'user' with content None"),
        ([{"role": "user", "content": 3}], "row 4, message 0: role 'user' with content 3"),
        ([{"role": "user", "content": "a"}, {"role": 7, "content": "b"}], "row 4, message 1: role 7"),
        ([{"role": "user", "content": "\ud800"}], "row 4, message 0.*not valid text"),
        ("a\ud800b", "row 4, column 'prompt'.*not valid text"),
        (b"\xff", "row 4, column 'prompt'.*not valid text"),
    ],
)
def test_contents_that_are_no_text_are_refused_by_row(tokenizer, value, says):
    with pytest.raises(DataError, match=says):
        PromptEncoder(tokenizer)({"prompt": value}, 4)


def test_a_template_that_raises_names_the_row_and_the_turns():
    picky = byte_tokenizer()
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match=r"row 4: the chat template refused turns of user, user: .*must alternate"):
        PromptEncoder(picky)({"prompt": [{"role": "user", "content": "a"}] * 2}, 4)
    with pytest.raises(DataError, match=r"turns of system, user: .*; change the row \(or data.system_prompt\), or the"):
        PromptEncoder(picky, system_prompt="b")({"prompt": [{"role": "user", "content": "a"}]})
    with pytest.raises(DataError, match=r"; change the content from a list of parts to its text, or the tokenizer's"):
        PromptEncoder(picky)({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]})


def test_settings_that_cannot_be_carried_out_are_refused(tokenizer):
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(bare, apply_chat_template=True)
    with pytest.raises(ConfigError, match="no chat template"):
        PromptEncoder(bare)({"prompt": [{"role": "user", "content": "x"}]})
    with pytest.raises(ConfigError, match="did you mean truncate_left"):
        PromptEncoder(tokenizer, on_long_prompt="truncate")
    with pytest.raises(ConfigError, match="max_prompt_length 0"):
        PromptEncoder(tokenizer, max_prompt_length=0)
    with pytest.raises(ConfigError, match="apply_chat_template=True for system_prompt"):
        PromptEncoder(tokenizer, system_prompt="A")({"prompt": "x"})


def test_the_first_empty_prompt_is_named_and_one_under_a_system_turn_is_none(tokenizer, caplog):
    encode = PromptEncoder(tokenizer, apply_chat_template=True)
    for number, prompt in enumerate(["1+1=", " ", [{"role": "user", "content": ""}]]):
        encode({"prompt": prompt}, number)
    assert [r.message.partition(",")[0] for r in caplog.records] == ["row 1: the prompt is empty"]
    caplog.clear()
    PromptEncoder(tokenizer, apply_chat_template=True, system_prompt="Say a number.")({"prompt": ""})
    assert not caplog.records
