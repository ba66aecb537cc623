"""What is trained of a conversation: against a naive oracle, over templates of several kinds."""

import numpy as np
import pytest
from chat_templates import MARKED, QWEN, bracketed, merging_tokenizer, said, tokenizer_with, user
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config import SupervisedDataConfig
from whet.data.conversations import render_turns
from whet.data.supervised import SFTEncoder
from whet.data.templates import ChatTemplate
from whet.data.text_parts import align_parts, leading_special_ids, tokenize_parts
from whet.errors import DataError

PLAIN = ("qwen", "llama", "gemma", "mistral")
"""Templates whose longer conversations begin as the shorter ones."""
TALK = [user("Hi, a b?"), said("It is <é>\n\nhere."), user("and\n2+2?"), said("4")]
SYSTEM = {"role": "system", "content": "Be brief."}


def oracle(tokenizer, messages):
    """(ids, mask): the whole is rendered and encoded once; a turn is where the text goes on after those before."""

    def text(part, asks):
        return tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=asks, enable_thinking=False)

    whole = text(messages, False)
    trained = np.zeros(len(whole.encode()), dtype=bool)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            start, end = text(messages[:place], True), text(messages[: place + 1], False)
            assert end.startswith(start) and whole.startswith(end)
            trained[len(start.encode()) : len(end.encode())] = True
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    sizes = [1 if i < 256 else len(tokenizer.decode([i])) for i in ids]
    ends = np.cumsum(sizes)
    return ids, trained[ends - 1]


def joined(sequence):
    ids = [*sequence.prefix.tolist(), *sequence.tokens.tolist()]
    return ids, np.concatenate([np.zeros(len(sequence.prefix), dtype=bool), sequence.mask])


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("messages", [TALK[:2], TALK, [*TALK, user("x"), said("y" * 40)], TALK[:3]])
def test_tokens_and_masks_are_those_of_the_naive_oracle(name, messages):
    tokenizer = tokenizer_with(name)
    made = SFTEncoder(tokenizer)({"messages": messages})
    assert len(made.sequences) == 1
    ids, mask = joined(made.sequences[0])
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant") + 1
    expected, trained = oracle(tokenizer, messages[:last])
    assert ids == expected and mask.tolist() == trained.tolist()
    assert not made.sequences[0].tokens.flags.writeable and made.sequences[0].tokens.dtype == np.int32


WORDS = st.lists(st.sampled_from(["a", "é", "\n", " ", "  ", "<b>", "[INST]", "user", "4"]), min_size=1).map("".join)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PLAIN), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3))
def test_any_words_are_trained_as_they_were_said_or_refused_where_the_template_trims(name, turns):
    tokenizer = tokenizer_with(name)
    messages = [m for a, b in turns for m in (user(a), said(b))]
    words = [b for _, b in turns]
    trims = name == "llama" and any(m["content"] != m["content"].strip() for m in messages)
    if trims or not all(w.strip() for w in words):
        return
    made = SFTEncoder(tokenizer)({"messages": messages})
    ids, mask = joined(made.sequences[0])
    expected, trained = oracle(tokenizer, messages)
    assert ids == expected and mask.tolist() == trained.tolist()
    text = bracketed(tokenizer, made.sequences[0])
    assert [w in run for w, run in zip(words, text.split("[[")[1:], strict=False)] == [True] * len(words)


def test_the_end_mark_and_the_line_feed_after_it_are_trained():
    tokenizer = tokenizer_with("qwen")
    (one,) = SFTEncoder(tokenizer)({"messages": TALK[2:]}).sequences
    assert bracketed(tokenizer, one) == (
        "<|im_start|>user\nand\n2+2?<|im_end|>\n<|im_start|>assistant\n[[4<|im_end|>\n]]"
    )


@pytest.mark.parametrize("name", ["qwen", "gemma", "mistral"])
def test_a_system_turn_is_context_wherever_the_template_puts_it(name):
    tokenizer = tokenizer_with(name)
    data = SupervisedDataConfig(system_prompt="Be brief.")
    own = SFTEncoder(tokenizer)({"messages": [SYSTEM, *TALK[:2]]})
    put = SFTEncoder(tokenizer, data)({"messages": TALK[:2]})
    kept = SFTEncoder(tokenizer, data)({"messages": [SYSTEM, *TALK[:2]]})
    text = bracketed(tokenizer, own.sequences[0])
    assert "Be brief." in text.split("[[")[0]
    assert [bracketed(tokenizer, x.sequences[0]) for x in (put, kept)] == [text, text]


def test_a_template_that_rewrites_earlier_turns_forks_and_each_turn_is_trained_once():
    tokenizer = tokenizer_with("qwen3")
    encode = SFTEncoder(tokenizer)
    think = "<think>\n{}\n</think>\n\n{}"
    row = {"messages": [user("a"), said(think.format("p", "b")), user("c"), said(think.format("q", "d"))]}
    made = encode(row)
    assert [bracketed(tokenizer, s) for s in made.sequences] == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[<think>\np\n</think>\n\nb<|im_end|>\n]]",
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nq\n</think>\n\nd<|im_end|>\n]]",
    ]
    assert encode.counts["forked"] == 1 and encode.counts["changed"] == 0
    assert len(encode({"messages": row["messages"][:2]}).sequences) == 1 and encode.counts["forked"] == 1


def test_tool_turns_inside_one_answer_do_not_fork_where_the_template_keeps_them():
    tokenizer = tokenizer_with("qwen3")
    turns = [user("a"), said("b", reasoning_content="p"), {"role": "tool", "content": "t"}, said("c")]
    (one,) = SFTEncoder(tokenizer)({"messages": turns}).sequences
    assert bracketed(tokenizer, one).count("[[") == 2


def test_thinking_is_asked_for_as_the_turn_thinks_unless_the_configuration_says():
    tokenizer = tokenizer_with("qwen3")
    thinks = {"messages": [user("a"), said("<think>\np\n</think>\n\nb")]}
    plain = {"messages": [user("a"), said("b")]}
    header = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"

    def text(row, **kwargs):
        data = SupervisedDataConfig(chat_template_kwargs=kwargs)
        return bracketed(tokenizer, SFTEncoder(tokenizer, data)(row).sequences[0])

    assert text(thinks) == header + "[[<think>\np\n</think>\n\nb<|im_end|>\n]]"
    assert text(plain) == header + "<think>\n\n</think>\n\n[[b<|im_end|>\n]]"
    assert text(plain, enable_thinking=True) == header + "[[<think>\n\n</think>\n\nb<|im_end|>\n]]"
    with pytest.raises(DataError, match=r"generation header of .*turn starts with"):
        text(thinks, enable_thinking=False)
    row = {**thinks, "chat_template_kwargs": {"enable_thinking": True}}
    assert text(row, enable_thinking=False) == text(thinks)


def test_a_conversation_that_the_assistant_opens_trains_its_first_turn_too():
    tokenizer = tokenizer_with("qwen")
    (one,) = SFTEncoder(tokenizer)({"messages": [said("hi"), user("a"), said("b")]}).sequences
    assert bracketed(tokenizer, one) == (
        "<|im_start|>assistant\n[[hi<|im_end|>\n]]<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>\n]]"
    )


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        ("assistant", ["It is <é>\n\nhere.<|im_end|>\n", "4<|im_end|>\n"]),
        ("last", ["4<|im_end|>\n"]),
        ("all", None),
    ],
)
def test_what_is_trained_is_every_turn_the_last_or_all(train_on, trained):
    tokenizer = tokenizer_with("qwen")
    encode = SFTEncoder(tokenizer, SupervisedDataConfig(train_on=train_on))
    (one,) = encode({"messages": TALK}).sequences
    text = bracketed(tokenizer, one)
    if trained is None:
        assert len(one.prefix) == 1 and one.mask.all()
    else:
        assert [run.split("]]")[0] for run in text.split("[[")[1:]] == trained


def test_a_turn_that_says_nothing_is_not_trained():
    tokenizer = tokenizer_with("qwen")
    row = {"messages": [user("a"), said(" "), user("b"), said("c")]}
    (one,) = SFTEncoder(tokenizer)(row).sequences
    assert bracketed(tokenizer, one).split("[[")[1:] == ["c<|im_end|>\n]]"]


# ---- generation marks ------------------------------------------------------------------------------------------------


def test_marks_of_the_template_say_what_is_trained_within_the_turns():
    tokenizer = tokenizer_with("marked")
    (one,) = SFTEncoder(tokenizer)({"messages": TALK}).sequences
    marks = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = joined(one)
    assert ids == marks["input_ids"] and mask.tolist() == [bool(m) for m in marks["assistant_masks"]]
    assert bracketed(tokenizer, one).endswith("[[4<|im_end|>]]\n")  # the line feed is not marked


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (MARKED.replace("== 'assistant'", "== 'user'", 1), "Hi, a b.*, which is not in an assistant's turn"),
        (MARKED.replace("{% endgeneration %}", "").replace("{% generation %}", "{% generation %}{% endgeneration %}"),
         "marks nothing of the turn"),
    ],
)  # fmt: skip
def test_marks_that_contradict_the_turns_are_an_error(template, says):
    with pytest.raises(DataError, match=says):
        SFTEncoder(tokenizer_with(template))({"messages": TALK})


def test_of_a_turn_that_is_marked_in_two_places_both_are_trained():
    template = MARKED.replace("{% generation %}{{", "{% generation %}A{% endgeneration %}-{% generation %}{{", 1)
    assert template != MARKED
    tokenizer = tokenizer_with(template)
    (one,) = SFTEncoder(tokenizer)({"messages": TALK[2:]}).sequences
    assert bracketed(tokenizer, one).endswith("assistant\n[[A]]-[[4<|im_end|>]]\n")


def test_marks_of_a_header_excuse_none_before_it():
    template = MARKED.replace("{% generation %}", "{% generation %}ok:")
    template = template.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nok:{% endif %}")
    template = template.replace("== 'assistant'", "!= 'system'", 1)
    with pytest.raises(DataError, match="which is not in an assistant's turn"):
        SFTEncoder(tokenizer_with(template))({"messages": TALK})


def test_marks_of_earlier_turns_in_a_fork_are_context():
    template = MARKED.replace("{% generation %}{{", "{% generation %}{% if loop.last %}!{% endif %}{{", 1)
    tokenizer = tokenizer_with(template)
    _, second = SFTEncoder(tokenizer)({"messages": TALK}).sequences
    assert bracketed(tokenizer, second).count("[[") == 1 and bracketed(tokenizer, second).endswith("[[!4<|im_end|>]]\n")


def test_a_header_that_is_marked_stays_given():
    template = MARKED.replace("{% generation %}", "{% generation %}ok:")
    template = template.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nok:{% endif %}")
    tokenizer = tokenizer_with(template)
    (one,) = SFTEncoder(tokenizer)({"messages": TALK[2:]}).sequences
    assert bracketed(tokenizer, one).endswith("assistant\nok:[[4<|im_end|>]]\n")


# ---- parts and tokens ------------------------------------------------------------------------------------------------


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def encode_parts(tokenizer, parts):
    return align_parts(tokenizer, parts, tokenize_parts(tokenizer, [parts])[0])


def test_a_token_never_spans_what_is_given_and_what_is_said():
    tokenizer = merging_tokenizer(("\n", "\n"), ("a", "b"))
    before, after = encode_parts(tokenizer, ["x\n", "\nab"])
    assert [*before, *after] != tokenizer("x\n\nab").input_ids
    assert (text_of(tokenizer, before), text_of(tokenizer, after)) == ("x\n", "\nab")
    assert before == tokenizer("x\n").input_ids  # what the model is given when it is asked


@pytest.mark.parametrize("parts", [["Q: hi\nA:", " hello"], ["Q: hi\nA: ", "hello"], ["2+2=", "4", "\nso"]])
def test_a_tokenizer_that_begins_texts_with_a_blank_adds_none_between_parts(parts):
    tokenizer = merging_tokenizer(("▁", "h"), ("▁h", "e"), ("▁", "4"), blank=True)
    ids = encode_parts(tokenizer, parts)
    assert text_of(tokenizer, [i for part in ids for i in part]) == "".join(parts)
    assert ids[0] == tokenizer(parts[0]).input_ids


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab \n4", min_size=1, max_size=5), min_size=1, max_size=4))
def test_parts_together_are_the_whole_text(parts):
    for tokenizer in (merging_tokenizer(("a", "b"), ("\n", "\n"), ("ab", "a")), tokenizer_with("qwen")):
        ids = encode_parts(tokenizer, parts)
        assert [text_of(tokenizer, i) for i in ids] == parts


def test_special_tokens_before_a_text_are_found():
    from tokenizers import processors

    tokenizer = merging_tokenizer()
    assert leading_special_ids(tokenizer("ab").input_ids, tokenizer("ab", add_special_tokens=False).input_ids) == []
    eos = tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", eos)]
    )
    assert leading_special_ids(tokenizer("ab").input_ids, tokenizer("ab", add_special_tokens=False).input_ids) == [eos]
    assert SFTEncoder(tokenizer)({"text": "ab"}).sequences[0].prefix.tolist() == [eos]
    lead, *prompt = SFTEncoder(tokenizer)({"prompt": "a", "response": "b"}).sequences[0].prefix.tolist()
    assert lead == eos and prompt == tokenizer("a", add_special_tokens=False).input_ids


def test_renderings_are_stretches_of_what_the_template_writes():
    template = ChatTemplate(tokenizer_with(QWEN))
    (one,) = render_turns(template, TALK)
    assert "".join(p.text for p in one.parts) == template.text(TALK) and len(one.parts) == 4
