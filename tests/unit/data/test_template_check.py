"""A template that changes or leaves out what is said is an error that shows both, in SFT as in RL."""

import pytest
from chat_templates import GEMMA, LLAMA, QWEN, QWEN3, bracketed, said, tokenizer_with, user
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.config import SupervisedDataConfig
from whet.data import template_check
from whet.data.prompts import PromptEncoder
from whet.data.supervised import SFTEncoder
from whet.data.template_check import RenderedText, find_changed_text
from whet.data.templates import ChatTemplate
from whet.errors import DataError

THINK = "<think>\np\n</think>\n\nb"
PARTS = [{"type": "text", "text": "hi"}]
JOINS = QWEN.replace(
    "{{ m.content }}", "{{ m.content if m.content is string else m.content | map(attribute='text') | join }}"
)
CALLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ ARGS }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = CALLS.replace("ARGS", "c.function.arguments | tojson")
AS_PYTHON = CALLS.replace("ARGS", "c.function.arguments")
CALL = said("", tool_calls=[{"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 'x"y'}}}])
NUMBERS = said("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])
TOOL = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
UPPER = QWEN.replace("{{ m.content }}", "{{ m.content | upper }}")
NO_SYSTEM = QWEN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
DROPS_THINKING = QWEN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")

CHANGED = [
    (LLAMA, [user("hi "), said("b")], "message 0 (user) says 'hi ', and the chat template shows 'hi'"),
    (LLAMA, [user("hi"), said("b\n")], "message 1 (assistant) says 'b\\n', and the chat template shows 'b'"),
    (QWEN3, [user("hi"), said("<think>p</think>b")], "says '<think>p</think>b', and the chat template shows "),
    (DROPS_THINKING, [user("hi"), said(THINK)], "says '<think>\\np\\n</think>\\n\\nb', and the chat template shows "),
    (QWEN, [user("hi"), said("b", reasoning_content="why")], "message 1 (assistant) says 'why', and the chat template"),
    (QWEN, [user("hi"), said("b", thinking="why")], "message 1 (assistant) says 'why', and the chat template"),
    (NO_SYSTEM, [{"role": "system", "content": "S"}, user("hi"), said("b")], "message 0 (system) says 'S'"),
    (UPPER, [user("hi"), said("b")], "message 0 (user) says 'hi', and the chat template shows 'HI'"),
    (QWEN, [user("hi"), CALL], "message 1 (assistant) says 'add'"),
]
SHOWN = [
    (LLAMA, [user("hi"), said("b")]),
    (QWEN, [user(" hi\n"), said(" b ")]),
    (QWEN3, [user("hi"), said(THINK)]),
    (QWEN3, [user("hi"), said(THINK), user("x"), said(THINK.replace("p", "q"))]),
    (QWEN, [user("<a> b </a>"), said("\n<x>\n 4 </x>\n")]),
    (QWEN, [user(""), said("b")]),
    (GEMMA, [{"role": "system", "content": "S"}, user("hi"), said("b")]),
    (JOINS, [user(PARTS), said("b")]),
    (AS_JSON, [user("hi"), CALL, {"role": "tool", "content": '{"a": "é"}'}, said("b")]),
    (AS_JSON, [user("hi"), NUMBERS]),
    (QWEN.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"),
     [user("hi"), said("b"), {"role": "tool", "content": 'say "a\nb"'}, said("c")]),
]  # fmt: skip


def sft(template, messages, **data):
    encode = SFTEncoder(tokenizer_with(template), SupervisedDataConfig(**data))
    return encode({"messages": messages}, 3), encode


@pytest.mark.parametrize(("template", "messages", "says"), CHANGED)
def test_what_the_template_changes_is_an_error_that_shows_both_and_can_be_accepted(template, messages, says):
    with pytest.raises(DataError) as error:
        sft(template, messages)
    text = str(error.value)
    assert text.startswith("row 3: message ") and says in text
    assert text.endswith("on_template_change=accept") and "or accept the change with" in text
    made, encode = sft(template, messages, on_template_change="accept")
    assert made.sequences and encode.counts["changed"] == 1
    assert encode.describe_counts() == "rows that the chat template changes: 1"


@pytest.mark.parametrize(("template", "messages"), SHOWN)
def test_what_the_template_shows_is_taken(template, messages):
    made, encode = sft(template, messages)
    assert made.sequences and encode.counts["changed"] == 0


def test_thinking_that_is_left_out_of_the_last_turn_s_context_alone_is_shown_in_its_own_sequence():
    messages = [user("hi"), said(THINK), user("x"), said(THINK)]
    assert len(sft(QWEN3, messages)[0].sequences) == 2
    with pytest.raises(DataError, match=r"message 1 \(assistant\) says .*on_template_change=accept"):
        sft(QWEN3, messages, train_on="last")  # no sequence shows it


@pytest.mark.parametrize(
    ("template", "messages", "printed"),
    [
        (QWEN, [user(PARTS), said("b")], r"\[\{'type': 'text', 'text': 'hi'\}\]"),
        (AS_PYTHON, [user("hi"), CALL], r"\{'a': 'x\"y'\}"),
        (AS_PYTHON, [user("hi"), NUMBERS], r"\{'a': 1\}"),
    ],
)
def test_lists_and_mappings_are_never_printed_as_python(template, messages, printed):
    for how in ("error", "accept"):
        with pytest.raises(DataError, match=rf"^row 3: the chat template prints {printed} in Python's notation"):
            sft(template, messages, on_template_change=how)


def test_tools_are_shown_or_refused():
    tokenizer = tokenizer_with(AS_JSON)
    row = {"messages": [user("hi"), CALL], "tools": [TOOL]}
    (one,) = SFTEncoder(tokenizer)(row).sequences
    assert '"name": "add"' in bracketed(tokenizer, one).split("[[")[0]
    assert bracketed(tokenizer, one).endswith('[[<call>add {"a": "x\\"y"}</call><|im_end|>\n]]')
    with pytest.raises(DataError, match=r"row 0: the row has the tools .*add.*, and the chat template shows none; ch"):
        SFTEncoder(tokenizer_with(QWEN))({"messages": [user("hi"), said("b")], "tools": [TOOL]})
    printing = tokenizer_with(AS_JSON.replace("{{ t | tojson }}", "{{ t }}"))
    with pytest.raises(DataError, match=r"prints \{'type': 'function'"):
        SFTEncoder(printing)(row)


# ---- prompts of RL ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prompt", "says"),
    [
        (LLAMA, [user("hi ")], r"row 2: message 0 \(user\) says 'hi ', and the chat template shows 'hi'"),
        (QWEN3, [user("a"), said(THINK), user("c")], r"row 2: message 1 \(assistant\) says '<think>"),
        (LLAMA, [user("a"), said(" It is")], r"row 2: message 1 \(assistant\) says ' It is', .* shows 'It is'"),
        (QWEN, [user(PARTS)], r"row 2: the chat template prints .* in Python's notation"),
    ],
)
def test_prompts_of_rl_are_checked_alike(template, prompt, says):
    tokenizer = tokenizer_with(template)
    with pytest.raises(DataError, match=says):
        PromptEncoder(tokenizer, on_answered="continue")({"prompt": prompt}, 2)
    if "Python" not in says:
        encode = PromptEncoder(tokenizer, on_template_change="accept", on_answered="continue")
        assert len(encode({"prompt": prompt}, 2).tokens) and encode.counts["changed"] == 1


def test_a_prompt_in_plain_text_is_checked_where_it_becomes_a_turn():
    tokenizer = tokenizer_with(LLAMA)
    with pytest.raises(DataError, match="says 'hi ', and the chat template shows 'hi'"):
        PromptEncoder(tokenizer, apply_chat_template=True)({"prompt": "hi "})
    assert PromptEncoder(tokenizer)({"prompt": "hi "}).tokens.tolist() == list(b"hi ")


@pytest.mark.parametrize("template", [QWEN, LLAMA, QWEN3])
def test_sft_and_rl_give_the_same_ids_for_the_same_prompt(template):
    tokenizer = tokenizer_with(template)
    prompt = PromptEncoder(tokenizer)({"prompt": [user("2+2?")]})
    (one,) = SFTEncoder(tokenizer)({"prompt": [user("2+2?")], "response": "4"}).sequences
    assert prompt.tokens.tolist() == one.prefix.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "\n", "<t>", "</t>", "<", ">", '"', "é"])).map("".join))
def test_any_text_is_shown_by_a_template_that_writes_it_and_missed_by_one_that_trims(text):
    talk = [user("q"), said("x" + text), user(text or "u"), said("y")]
    assert sft(QWEN, talk)[1].counts["changed"] == 0
    trimmed = any(m["content"] != m["content"].strip() for m in talk)
    assert sft(LLAMA, talk, on_template_change="accept")[1].counts["changed"] == trimmed


def test_long_white_space_is_no_burden():
    assert sft(QWEN, [user("a" + " " * 100_000 + "b"), said("c")])[0].sequences


TEXTS = st.text(alphabet=" \nab<>/{}\ue000\ue001\u00e9", max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([LLAMA, QWEN, QWEN3, GEMMA, NO_SYSTEM, UPPER]), st.lists(TEXTS, min_size=1, max_size=3))
def test_the_quick_look_at_plain_texts_finds_nothing_that_the_close_one_refuses(template, texts):
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    chat = ChatTemplate(tokenizer_with(template))
    shown = [
        RenderedText(chat.text(messages, add_generation_prompt=True), len(messages), {"add_generation_prompt": True})
    ]
    quick = template_check._shows_plain_texts(chat, messages, shown, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_check, "_shows_plain_texts", lambda *_: False)
        assert not (quick and find_changed_text(chat, messages, shown))
    assert quick or template != QWEN or not all(texts) or any("<" in text for text in texts)
