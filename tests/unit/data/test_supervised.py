"""The forms of rows, pairs and labelled answers, over-long and empty rows, and every refusal."""

import json

import numpy as np
import pytest
from chat_templates import QWEN, QWEN3, bracketed, said, tokenizer_with, user

from whet.config import SupervisedDataConfig
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder, UnpairedEncoder
from whet.data.supervised import SFTEncoder
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.types import TokenBatch

HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TALK = [user("hi"), said("yo")]
SHARE = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo", "weight": None}]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with("qwen")


def texts(tokenizer, example):
    return [bracketed(tokenizer, s) for s in example.sequences]


def sft(tokenizer, row, **data):
    return texts(tokenizer, SFTEncoder(tokenizer, SupervisedDataConfig(**data))(row))


# ---- SFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": np.array(TALK, dtype=object), "id": 3},
        {"messages": json.dumps(TALK)},
        {"conversations": SHARE},
        {"conversations": json.dumps(SHARE)},
        {"conversations": TALK},
        {"messages": SHARE},
        {"prompt": "hi", "prompt_id": "x", "messages": TALK},
        {"prompt": [user("hi")], "response": "yo"},
        {"prompt": [user("hi")], "completion": [said("yo")]},
        {"prompt": "hi", "completion": [said("yo")]},
        {"prompt": "hi", "completion": TALK},
        {"prompt": [user("hi")], "completion": TALK},
        {"question": json.dumps([user("hi")]), "completion": json.dumps([said("yo")]), "text": "?"},
        {"messages": [user("hi")], "response": "yo"},
        {"messages": None, "text": json.dumps(TALK)},
        {"messages": [{"role": "user", "content": "hi", "tool_calls": None}, said("yo")], "tools": None},
    ],
)
def test_conversations_in_every_form_give_the_same_tokens(tokenizer, row):
    assert sft(tokenizer, row) == [HEAD + "[[yo<|im_end|>\n]]"]


def test_prompt_and_response_are_plain_text_unless_they_are_to_be_turns(tokenizer):
    row = {"prompt": "hi", "response": "yo"}
    assert sft(tokenizer, row) == ["hi[[yo<|im_end|>]]"]
    assert sft(tokenizer, row, apply_chat_template=True) == [HEAD + "[[yo<|im_end|>\n]]"]
    assert sft(tokenizer, row, train_on="all") == ["h[[iyo<|im_end|>]]"]
    system = {"apply_chat_template": True, "system_prompt": "S"}
    assert sft(tokenizer, row, **system) == ["<|im_start|>system\nS<|im_end|>\n" + HEAD + "[[yo<|im_end|>\n]]"]


def test_plain_text_is_trained_from_its_second_token_to_the_eos_which_is_put_once(tokenizer):
    assert sft(tokenizer, {"text": "abc"}) == ["a[[bc<|im_end|>]]"]
    assert sft(tokenizer, {"text": "abc<|im_end|>"}) == ["a[[bc<|im_end|>]]"]
    assert sft(tokenizer, {"text": "abc"}, apply_chat_template=True) == ["a[[bc<|im_end|>]]"]


def test_only_what_follows_the_prompt_is_trained_of_a_prompt_with_turns_of_the_assistant(tokenizer):
    row = {"prompt": [*TALK, user("x")], "completion": [said("a"), user("b"), said("c")]}
    (text,) = sft(tokenizer, row)
    assert [run.split("]]")[0] for run in text.split("[[")[1:]] == ["a<|im_end|>\n", "c<|im_end|>\n"]


def test_a_column_that_is_named_is_the_one_that_is_read(tokenizer):
    row = {"prompt": "p", "response": "r", "messages": TALK, "text": "abc", "body": "xyz", "q": "Q"}
    assert sft(tokenizer, row) == ["p[[r<|im_end|>]]"]
    assert sft(tokenizer, row, messages_column="messages") == [HEAD + "[[yo<|im_end|>\n]]"]
    assert sft(tokenizer, row, text_column="body") == ["x[[yz<|im_end|>]]"]
    assert sft(tokenizer, row, prompt_column="q") == ["Q[[r<|im_end|>]]"]
    assert sft(tokenizer, row, prompt_column="q", response_column="body") == ["Q[[xyz<|im_end|>]]"]


def test_an_example_knows_its_row(tokenizer):
    made = SFTEncoder(tokenizer)({"text": "abc"}, 7)
    assert made.row == 7 and made.columns == {}
    assert TokenBatch.from_examples([made]).token_columns["mask"].tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("text", "row 2 is str; a row is a mapping"),
        (
            {"mesages": TALK},
            "row 2 has the columns mesages; did you mean messages? accepted are messages or conversations",
        ),
        ({"prompt": "x"}, "accepted are messages or conversations; prompt (or question) with response (or completion)"),
        ({"messages": "hello"}, "column 'messages' holds the text 'hello'; expected a list of messages, or its JSON"),
        ({"messages": "[1, 2]"}, "column 'messages' holds the text '[1, 2]'; expected a list of messages"),
        ({"messages": []}, "column 'messages' holds list []; expected a text or a list"),
        ({"messages": [{"role": "user"}]}, "message 0: {'role': 'user'}; a message has a role and a content"),
        ({"messages": [user(3)]}, "message 0: role 'user' with content 3"),
        ({"messages": [user([{"type": "image"}])]}, "message 0 has parts image; whet trains on text only"),
        ({"messages": [user([3])]}, "message 0 has the part 3; a part must be a text"),
        ({"messages": TALK, "images": [1]}, "row 2 has an 'images' column; whet trains on text only"),
        ({"conversations": [{"from": "humn", "value": "x"}]}, "from 'humn' is not a known role; did you mean human?"),
        ({"messages": TALK, "tools": "x"}, "column 'tools' is not JSON"),
        ({"messages": TALK, "tools": {"a": 1}}, "column 'tools' holds {'a': 1}; expected a list of functions"),
        (
            {"prompt": 3, "response": "x"},
            "column 'prompt' holds int 3; expected a text or a list of messages; a csv file's numbers are read as "
            "numbers: keep texts such as '42' in a .jsonl file",
        ),
        ({"prompt": TALK, "response": "x"}, "the prompt ends with an assistant's turn, and the answer is a text"),
        ({"prompt": "", "response": "x"}, "the prompt '' has no tokens"),
        ({"text": "a\ud800"}, "row 2, column 'text': 'a\\ud800' is not valid text"),
        (
            {"messages": [user("x")]},
            "row 2 has nothing to train: its turns are of user, and only the assistant's text is trained",
        ),
        (
            {"messages": [user("x"), {"role": "model", "content": "y"}]},
            "nothing to train: its turns are of model, user",
        ),
        ({"messages": [user("x"), said("\n")]}, "row 2 has nothing to train"),
        ({"prompt": "x", "response": ""}, "row 2 has nothing to train: its answer is empty"),
        ({"text": None}, "row 2: column 'text' is null; fill it, or leave the row out"),
    ],
)
def test_rows_that_can_t_be_trained_on_say_why_and_which(tokenizer, row, says):
    with pytest.raises(DataError) as error:
        SFTEncoder(tokenizer)(row, 2)
    assert says in str(error.value) and "row 2" in str(error.value)


def test_a_named_column_that_is_not_there_is_named_with_the_nearest(tokenizer):
    with pytest.raises(DataError, match=r"row 0 has no column 'chat', which messages_column names; did you mean chats"):
        SFTEncoder(tokenizer, SupervisedDataConfig(messages_column="chat"))({"chats": TALK})


def test_settings_that_can_t_be_carried_out_are_refused(tokenizer):
    bare = tokenizer_with(QWEN)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        SFTEncoder(bare, SupervisedDataConfig(apply_chat_template=True))
    with pytest.raises(ConfigError, match="no chat template"):
        SFTEncoder(bare)({"messages": TALK})
    assert sft(bare, {"prompt": "a", "response": "b"}) == ["a[[b<|im_end|>]]"]
    with pytest.raises(ConfigError, match="row 0 is plain text, which has no system turn"):
        sft(tokenizer, {"text": "a"}, system_prompt="S")
    bare.eos_token = None
    with pytest.raises(ConfigError, match="no eos token"):
        sft(bare, {"text": "ab"})


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pair(tokenizer, row, **data):
    return PreferenceEncoder(tokenizer, SupervisedDataConfig(**data))(row, 4)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("hi")], "chosen": "a", "rejected": "b"},
        {"prompt": [user("hi")], "chosen": [said("a")], "rejected": [said("b")]},
        {"prompt": "hi", "chosen": [said("a")], "rejected": [said("b")]},
        {"messages": [user("hi")], "chosen": "a", "rejected": "b"},
        {"conversations": SHARE[:1], "chosen": "a", "rejected": "b"},
        {"chosen": [user("hi"), said("a")], "rejected": [user("hi"), said("b")]},
        {"prompt": "hi", "chosen": [user("hi"), said("a")], "rejected": [user("hi"), said("b")], "messages": TALK},
        {"prompt": [user("hi")], "chosen": [user("hi"), said("a")], "rejected": [user("hi"), said("b")]},
        {"chosen": json.dumps([user("hi"), said("a")]), "rejected": json.dumps([user("hi"), said("b")])},
    ],
)
def test_pairs_in_every_form_give_the_same_tokens_and_share_the_prompt(tokenizer, row):
    made = pair(tokenizer, row)
    assert texts(tokenizer, made) == [HEAD + "[[a<|im_end|>\n]]", HEAD + "[[b<|im_end|>\n]]"]
    assert made.columns == {"chosen": (1.0, 0.0)} and made.row == 4
    assert made.sequences[0].prefix is made.sequences[1].prefix
    batch = TokenBatch.from_examples([made], paired=True)
    assert batch.prefix_of.tolist() == [0, 0] and batch.unit_of.tolist() == [0, 0]


def test_pairs_of_plain_texts(tokenizer):
    row = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    assert texts(tokenizer, pair(tokenizer, row)) == ["hi[[a<|im_end|>]]", "hi[[b<|im_end|>]]"]
    turns = texts(tokenizer, pair(tokenizer, row, apply_chat_template=True))
    assert turns == [HEAD + "[[a<|im_end|>\n]]", HEAD + "[[b<|im_end|>\n]]"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("Q: x A: now", "Q: x A: ever", ["Q: x A: [[now<|im_end|>]]", "Q: x A: [[ever<|im_end|>]]"]),
        ("ab", "a", ["a[[b<|im_end|>]]", "a[[<|im_end|>]]"]),
        ("a", "a<|im_end|>b", ["a[[<|im_end|>]]", "a[[<|im_end|>b<|im_end|>]]"]),  # each keeps a token
        ("xa", "yb", ["x[[a<|im_end|>]]", "y[[b<|im_end|>]]"]),
    ],
)
def test_whole_texts_share_the_tokens_that_they_begin_with(tokenizer, chosen, rejected, expected):
    assert texts(tokenizer, pair(tokenizer, {"chosen": chosen, "rejected": rejected})) == expected


def test_the_implicit_prompt_is_whole_messages(tokenizer):
    """TRL 1.16 takes common characters: "now" against "never" puts "n" into the prompt."""
    row = {"chosen": [user("hi"), said("now")], "rejected": [user("hi"), said("never")]}
    assert texts(tokenizer, pair(tokenizer, row)) == [HEAD + "[[now<|im_end|>\n]]", HEAD + "[[never<|im_end|>\n]]"]
    shared = [user("hi"), said("a"), user("b")]
    made = pair(tokenizer, {"chosen": [*shared, said("c")], "rejected": [*shared, said("d")]})
    assert [t.count("[[") for t in texts(tokenizer, made)] == [1, 1]


def test_one_conversation_that_goes_on_where_the_other_ends_still_leaves_each_an_answer(tokenizer):
    longer = [user("hi"), said("a"), user("b"), said("c")]
    made = pair(tokenizer, {"chosen": longer, "rejected": longer[:2]})
    assert [t.count("[[") for t in texts(tokenizer, made)] == [2, 1]


def test_texts_that_differ_in_their_first_token_alone_can_be_scored_and_not_foretold(tokenizer):
    row = {"chosen": "x", "rejected": "y"}
    for encoder in (PreferenceEncoder, UnpairedEncoder):
        with pytest.raises(DataError, match="row 4: chosen and rejected differ only in their first token"):
            encoder(tokenizer)(row, 4)
    assert texts(tokenizer, ScoredPairEncoder(tokenizer)(row)) == ["x[[<|im_end|>]]", "y[[<|im_end|>]]"]


def test_an_answer_that_begins_with_the_text_of_its_prompt_is_taken_and_counted(tokenizer):
    encode = PreferenceEncoder(tokenizer)
    made = encode({"prompt": "hi", "chosen": "hi a", "rejected": "b"})
    assert texts(tokenizer, made) == ["hi[[hi a<|im_end|>]]", "hi[[b<|im_end|>]]"]
    assert encode({"prompt": "hi", "chosen": "a", "rejected": "b"}) and encode.counts["repeating"] == 1
    assert "repeats the prompt's text at its start: 1 (if the answers include" in encode.describe_counts()


@pytest.mark.parametrize("margin", [0, 0.5, np.float32(2)])
def test_a_margin_goes_with_both_sequences(tokenizer, margin):
    row = {"prompt": "x", "chosen": "a", "rejected": "b", "margin": margin}
    assert pair(tokenizer, row).columns["margin"] == (float(margin), float(margin))
    named = {**row, "gap": 3.0}
    assert pair(tokenizer, named, margin_column="gap").columns["margin"] == (3.0, 3.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": "a", "rejeted": "b"}, "row 4 has the columns chosen, rejeted; did you mean rejected?"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "nothing to train: chosen and rejected are the same"),
        (
            {"prompt": "x", "chosen": "a", "rejected": [said("b")]},
            "'chosen' and 'rejected' is a text, and the other is a",
        ),
        (
            {"prompt": "x", "chosen": TALK, "rejected": [said("b")]},
            "'chosen' starts with a turn of 'user', but not with",
        ),
        ({"prompt": "hi", "chosen": TALK, "rejected": [said("b")]}, "'chosen' repeats the row's prompt, and the other"),
        (
            {"chosen": [user("x"), said("a")], "rejected": [user("y"), said("b")]},
            "row 4: chosen and rejected differ first in message 0 (user), so they answer different prompts",
        ),
        ({"chosen": TALK, "rejected": [*TALK[:1], user("!"), said("b")]}, "differ first in message 1 (user)"),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": None},
            "column 'margin' holds None; expected a number",
        ),
        ({"prompt": "x", "chosen": "a", "rejected": "b", "margin": float("nan")}, "column 'margin' holds nan"),
        ({"chosen": [user("x")], "rejected": [user("x"), user("y")]}, "nothing to train: its turns are of user"),
    ],
)
def test_pairs_that_can_t_be_trained_on_say_why(tokenizer, row, says):
    with pytest.raises(DataError) as error:
        pair(tokenizer, row)
    assert says in str(error.value)


def test_an_answer_of_several_turns_that_the_template_forks_is_refused():
    tokenizer = tokenizer_with(QWEN3)
    long = [said("a"), user("b"), said("c")]
    with pytest.raises(DataError, match=r"row 4: an answer has 2 turns, .*make the answer the last turn only"):
        pair(tokenizer, {"prompt": [user("hi")], "chosen": long, "rejected": [said("d")]})
    prompt = {"prompt": [user("hi"), *long[:2]]}  # earlier turns in the prompt are no matter
    assert len(pair(tokenizer, {**prompt, "chosen": [said("c")], "rejected": [said("d")]}).sequences) == 2


def test_an_empty_answer_of_a_pair_is_its_end_mark(tokenizer):
    made = pair(tokenizer, {"prompt": [user("hi")], "chosen": "a", "rejected": ""})
    assert texts(tokenizer, made)[1] == HEAD + "[[<|im_end|>\n]]"


# ---- labelled answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [True, 1, 1.0, np.bool_(True)])
@pytest.mark.parametrize("prompt", ["hi", [user("hi")]])
def test_a_labelled_answer_is_a_sequence_with_its_label(tokenizer, label, prompt):
    encode = UnpairedEncoder(tokenizer, SupervisedDataConfig(apply_chat_template=True))
    made = encode({"prompt": prompt, "completion": "yo", "label": label})
    assert texts(tokenizer, made) == [HEAD + "[[yo<|im_end|>\n]]"] and made.columns == {"label": (1.0,)}
    made = encode({"prompt": prompt, "completion": TALK, "label": label})  # the whole conversation
    assert texts(tokenizer, made) == [HEAD + "[[yo<|im_end|>\n]]"]
    made = encode({"prompt": prompt, "completion": [said("yo")], "label": not label})
    assert texts(tokenizer, made) == [HEAD + "[[yo<|im_end|>\n]]"] and made.columns == {"label": (0.0,)}


def test_a_pair_is_a_good_and_a_bad_answer(tokenizer):
    made = UnpairedEncoder(tokenizer)({"prompt": "x", "chosen": "a", "rejected": "b"})
    assert texts(tokenizer, made) == ["x[[a<|im_end|>]]", "x[[b<|im_end|>]]"] and made.columns == {"label": (1.0, 0.0)}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "x", "completion": "y", "label": "good"},
            "column 'label' holds 'good'; a label must be true, false",
        ),
        ({"prompt": "x", "completion": "y", "label": 2}, "column 'label' holds 2"),
        ({"prompt": "x", "label": True}, "accepted are prompt (or messages) with completion (or response) and label"),
        ({"prompt": "x", "completion": "y"}, "accepted are prompt (or messages) with completion"),
    ],
)
def test_labelled_answers_that_can_t_be_trained_on_say_why(tokenizer, row, says):
    with pytest.raises(DataError) as error:
        UnpairedEncoder(tokenizer)(row)
    assert says in str(error.value)


# ---- policies --------------------------------------------------------------------------------------------------------

LONG = {"prompt": "abcd", "response": "efgh"}  # 9 tokens


@pytest.mark.parametrize(
    ("limit", "text"), [(9, "abcd[[efgh<|im_end|>]]"), (8, "abcd[[efgh]]"), (5, "abcd[[e]]"), (4, None), (1, None)]
)
def test_truncate_cuts_the_end_and_drops_what_has_nothing_trained_left(tokenizer, limit, text):
    encode = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=limit, on_long="truncate"))
    made = encode(LONG)
    assert (None if made is None else texts(tokenizer, made)[0]) == text
    assert encode.counts["truncated"] == (limit < 9 and text is not None)
    assert (encode.counts["encoded"], encode.counts["dropped"]) == ((0, 1) if text is None else (1, 0))


def test_drop_leaves_long_rows_out_and_counts_them(tokenizer):
    encode = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=8, on_long="drop"))
    made = [encode(row, i) for i, row in enumerate([LONG, {"prompt": "a", "response": "b"}])]
    assert made[0] is None and made[1].row == 1
    assert encode.counts == {"encoded": 1, "forked": 0, "truncated": 0, "changed": 0} | {
        "repeating": 0,
        "dropped": 1,
        "empty": 0,
    }
    assert encode.describe_counts() == (
        "1 of 2 rows is over data.max_length 8: the longest has 9 tokens, 95 % of all rows have 9 or fewer "
        "(0 cut at the end, 1 left out)"
    )


def test_a_long_row_is_an_error_that_names_it_and_the_ways_on(tokenizer):
    encode = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=8))
    with pytest.raises(
        DataError, match=r"row 3 has 9 tokens, over data.max_length 8; raise it to 9, or set data.on_long"
    ):
        encode(LONG, 3)


def test_all_rows_together_give_one_message_with_how_many_the_longest_and_the_95th_percentile(tokenizer, caplog):
    rows = [{"text": "x" * n} for n in range(1, 101)]  # of 2 to 101 tokens
    with pytest.raises(DataError) as error:
        encode = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=81))
        with encode.all_rows():
            for row in rows:
                encode(row)
    assert str(error.value) == (
        "20 of 100 rows are over data.max_length 81: the longest has 101 tokens, 95 % of all rows have 97 or fewer; "
        "raise it to 101, or set data.on_long to truncate (cut the end off) or drop"
    )
    encode = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=81, on_long="truncate"))
    with encode.all_rows():
        made = [encode(row) for row in rows]
    assert max(len(x.sequences[0].tokens) for x in made) == 80
    assert [r.message for r in caplog.records] == [
        encode.describe_counts()
    ] and "20 cut at the end, 0 left out" in encode.describe_counts()


@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_a_pair_is_dropped_whole(tokenizer, on_long):
    encode = PreferenceEncoder(tokenizer, SupervisedDataConfig(max_length=5, on_long=on_long))
    assert encode({"prompt": [user("a")], "chosen": "b", "rejected": "c"}) is None
    assert encode({"prompt": "abc", "chosen": "defg", "rejected": "dehi"}) is None  # alike once they are cut
    long = {"prompt": "abc", "chosen": "defg", "rejected": "h"}
    made = encode(long)
    assert (made is None) == (on_long == "drop")
    if made is not None:
        assert texts(tokenizer, made) == ["abc[[de]]", "abc[[h<|im_end|>]]"]


def test_forks_over_the_limit_are_cut_one_by_one():
    tokenizer = tokenizer_with(QWEN3)
    row = {"messages": [user("a"), said("b"), user("c" * 100), said("d")]}
    first = SFTEncoder(tokenizer)({"messages": row["messages"][:2]}).sequences[0]
    limit = len(first.prefix) + len(first.tokens)
    made = SFTEncoder(tokenizer, SupervisedDataConfig(max_length=limit, on_long="truncate"))(row)
    assert len(made.sequences) == 1 and made.sequences[0].tokens.tolist() == first.tokens.tolist()


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (SFTEncoder, {"messages": [user("x")]}),
        (SFTEncoder, {"prompt": "x", "response": " "}),
        (PreferenceEncoder, {"prompt": "x", "chosen": "a", "rejected": "a"}),
    ],
)
def test_rows_with_nothing_to_train_are_dropped_and_counted_where_that_is_asked_for(tokenizer, encoder, row):
    encode = encoder(tokenizer, SupervisedDataConfig(on_empty="drop"))
    assert encode(row) is None and encode.counts["empty"] == 1
    assert encode.describe_counts() == "rows with nothing to train, left out: 1"


EMPTY = user("")


@pytest.mark.parametrize(
    ("encoder", "row"),
    [
        (SFTEncoder, {"messages": [EMPTY, said("yo")]}),
        (SFTEncoder, {"messages": [user(" \n"), said("yo"), user("hi"), said("ho")]}),
        (SFTEncoder, {"prompt": " ", "response": "yo"}),
        (PreferenceEncoder, {"prompt": [EMPTY], "chosen": [said("a")], "rejected": [said("b")]}),
        (PreferenceEncoder, {"chosen": [EMPTY, said("a")], "rejected": [EMPTY, said("b")]}),
        (PreferenceEncoder, {"prompt": " ", "chosen": "a", "rejected": "b"}),
        (UnpairedEncoder, {"prompt": [EMPTY], "completion": "a", "label": True}),
    ],
)
def test_the_first_row_with_an_empty_prompt_is_named(tokenizer, encoder, row, caplog):
    encode = encoder(tokenizer)
    assert all(encode(row, number) is not None for number in (3, 4))
    assert [r.message.partition(",")[0] for r in caplog.records] == ["row 3: the prompt is empty"]


def test_a_prompt_with_any_text_and_a_row_without_a_prompt_are_not_called_empty(tokenizer, caplog):
    for row in ({"messages": TALK}, {"messages": [said("yo")]}, {"text": "yo"}, {"prompt": "hi", "response": "yo"}):
        assert SFTEncoder(tokenizer)(row) is not None
    data = SupervisedDataConfig(system_prompt="Say a number.")
    assert SFTEncoder(tokenizer, data)({"messages": [EMPTY, said("4")]}) is not None
    assert not caplog.records


@pytest.mark.parametrize("encoder", [SFTEncoder, PreferenceEncoder])
def test_a_batch_is_encoded_as_its_rows_one_by_one_in_one_call_of_the_tokenizer(encoder, monkeypatch):
    if encoder is SFTEncoder:
        rows = [{"messages": TALK}, {"prompt": "2+2=", "response": "4"}, {"text": "abc"}, {"messages": TALK[:2]}]
    else:
        rows = [{"prompt": "x", "chosen": f"{n}", "rejected": "b"} for n in range(3)] + [
            {"chosen": "ab", "rejected": "ac"}
        ]
    tokenizer, calls = byte_tokenizer(), []
    single = [encoder(tokenizer)(row, n + 5) for n, row in enumerate(rows)]
    batch_encode = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *a, **k: calls.append(1) or batch_encode(*a, **k))
    batch = encoder(tokenizer).encode_batch(rows, 5)
    assert len(calls) == 2, "one call for all texts, and one for the special tokens of plain texts"
    for one, other in zip(single, batch, strict=True):
        assert (one.row, one.columns) == (other.row, other.columns)
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert all(np.array_equal(vars(a)[name], vars(b)[name]) for name in ("prefix", "tokens", "mask"))


def test_the_first_wrong_row_of_a_batch_is_the_error():
    rows = [{"text": "a"}, {"text": "too long"}, {"nothing": 1}]
    with pytest.raises(DataError, match=r"row 1 has .* over data.max_length 3"):
        SFTEncoder(byte_tokenizer(), SupervisedDataConfig(max_length=3)).encode_batch(rows)
    with pytest.raises(DataError, match="row 2 has the columns nothing"):
        SFTEncoder(byte_tokenizer()).encode_batch(rows)
