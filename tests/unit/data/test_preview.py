"""What a model is given, as a person is shown it."""

import pytest
from chat_templates import LLAMA, QWEN, QWEN3, TEMPLATES, said, tokenizer_with, user

from whet.config import SupervisedDataConfig
from whet.data.preference import PreferenceEncoder, UnpairedEncoder
from whet.data.preview import example_lines, prompt_lines, text_lines
from whet.data.prompts import PromptEncoder
from whet.data.supervised import SFTEncoder
from whet.data.templates import uses_chat_template
from whet.data.tokenizer import byte_tokenizer
from whet.errors import DataError

TOOLS = [{"name": "add"}]
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + QWEN
# takes a content of parts, as templates of models that also see do
OF_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what each kind of template makes of a system prompt and the text "2+2?"
WRITTEN = {
    "qwen": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    ),
    "llama": "<|bos|><|start|>system<|end|>\n\nBe brief.<|eot|><|start|>user<|end|>\n\n2+2?<|eot|><|start|>assistant"
    "<|end|>\n\n",
    "gemma": "<|bos|><|start|>user\nBe brief.\n\n2+2?<|eot|>\n<|start|>model\n",
    "mistral": "<|bos|>[INST] Be brief.\n\n2+2?[/INST]",
}


def shown(lines):
    """The text that lines show."""
    marked = [line[4:] for line in lines if line.startswith(("  | ", "  + "))]
    return "".join(marked).replace("\\n", "\n")


@pytest.mark.parametrize("kind", WRITTEN)
def test_plain_text_goes_through_each_kind_of_template_and_is_shown_as_it_is_given(kind):
    tokenizer = tokenizer_with(kind)
    assert uses_chat_template(tokenizer)
    encode = PromptEncoder(tokenizer, apply_chat_template=uses_chat_template(tokenizer), system_prompt="Be brief.")
    made = encode({"prompt": "2+2?"})
    assert tokenizer.decode(made.tokens) == WRITTEN[kind]
    lines = prompt_lines(encode, made, width=200)
    assert lines[0] == f"row 0: {len(made.tokens)} tokens" and shown(lines) == WRITTEN[kind]
    told = [line for line in lines if not line.startswith(("  | ", "row "))]
    assert told[:2] == ["  chat template: from the tokenizer", "  system prompt: from data.system_prompt"]
    assert [line.split(":")[0] for line in told[2:]] == (["  thinking"] if kind == "qwen3" else [])
    plain = PromptEncoder(tokenizer)
    assert prompt_lines(plain, plain({"prompt": "2+2?"}))[-1] == "  plain text, without a chat template"


def test_the_templates_own_options_reach_it_and_are_told():
    off, on = (
        PromptEncoder(tokenizer_with(QWEN3), chat_template_kwargs=given) for given in ({}, {"enable_thinking": True})
    )
    row = {"prompt": [user("2+2?")]}
    assert prompt_lines(off, off(row))[-1] == "  thinking: off (enable_thinking of rollout.chat_template_kwargs)"
    assert prompt_lines(on, on(row))[-1] == "  thinking: on (enable_thinking of rollout.chat_template_kwargs)"
    assert "think" not in shown(prompt_lines(on, on(row)))
    own = {**row, "chat_template_kwargs": {"enable_thinking": True}}
    assert off(own).tokens.tolist() == on(row).tokens.tolist()  # a row's own column


@pytest.mark.parametrize(
    ("prompt", "system_prompt", "template", "told"),
    [
        ([{"role": "system", "content": "A"}, user("b")], "C", QWEN, "from the row"),
        ([user("b")], "C", QWEN, "from data.system_prompt"),
        ([user("b")], None, QWEN, "none"),
        ([user("b")], None, "<|im_start|>system\nYou are Q.<|im_end|>\n" + QWEN, "from the template"),
    ],
)
def test_where_the_system_prompt_came_from_is_told(prompt, system_prompt, template, told):
    encode = PromptEncoder(tokenizer_with(template), system_prompt=system_prompt)
    assert f"  system prompt: {told}" in prompt_lines(encode, encode({"prompt": prompt}))


def test_a_template_of_the_configuration_or_the_row_is_told():
    other = PromptEncoder(byte_tokenizer(), chat_template_kwargs={"chat_template": TEMPLATES["llama"]})
    row = {"prompt": [user("b")]}
    assert "  chat template: from rollout.chat_template_kwargs" in prompt_lines(other, other(row))
    own = {**row, "chat_template_kwargs": {"chat_template": QWEN}}
    assert "  chat template: from a column of the row" in prompt_lines(other, other(own))


def test_parts_and_tools_are_rendered_or_refused_and_never_printed_as_python():
    parts = [user([{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}])]
    encode = PromptEncoder(tokenizer_with(OF_PARTS))
    assert "2+2?<|im_end|>" in shown(prompt_lines(encode, encode({"prompt": parts})))
    own = PromptEncoder(tokenizer_with("<|im_start|>system\nYou are Q.<|im_end|>\n" + OF_PARTS))
    assert "  system prompt: from the template" in prompt_lines(own, own({"prompt": parts}))
    for kind in ("qwen", "llama", "gemma", "mistral"):
        with pytest.raises(DataError, match=r"row 4: the chat template prints .* in Python's notation"):
            PromptEncoder(tokenizer_with(kind))({"prompt": parts}, 4)
    row = {"prompt": [user("2+2?")], "tools": TOOLS}
    encode = PromptEncoder(tokenizer_with(TOOL_TEMPLATE))
    lines = prompt_lines(encode, encode(row))
    assert shown(lines).startswith('[{"name": "add"}]\n<|im_start|>user') and lines[-1] == "  tools: 1, from the row"
    with pytest.raises(DataError, match=r"row 4: it has the tools .*add.*, and the chat template shows none"):
        PromptEncoder(tokenizer_with(QWEN))(row, 4)
    with pytest.raises(DataError, match=r"row 4: the chat template prints .* in Python's notation"):
        PromptEncoder(tokenizer_with("{{ tools }}" + QWEN))(row, 4)


def test_what_is_trained_is_marked():
    encode = SFTEncoder(tokenizer_with(LLAMA), SupervisedDataConfig(system_prompt="Be brief."))
    row = {"messages": [user("2+2?"), said("4"), user("ok?"), said("yes")]}
    lines = example_lines(encode, encode(row, 3), row)
    trained = [line[4:] for line in lines if line.startswith("  + ")]
    assert trained == ["4<|eot|>", "yes<|eot|>"]
    assert lines[0].startswith("row 3: ") and lines[0].endswith(f" {2 + 4} trained (lines with +)")
    assert lines[-2:] == ["  chat template: from the tokenizer", "  system prompt: from data.system_prompt"]


def test_the_sequences_of_a_row_have_names():
    pair = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    labelled = {"prompt": "2+2=", "completion": "5", "label": False}
    talk = {"messages": [user("a"), said("<think>\nb\n</think>\n\nc"), user("d"), said("e")]}
    cases = [
        (PreferenceEncoder(byte_tokenizer()), pair, [", chosen", ", rejected"]),
        (UnpairedEncoder(byte_tokenizer()), labelled, [", bad"]),
        (SFTEncoder(tokenizer_with(QWEN3)), talk, [", sequence 1 of 2", ", sequence 2 of 2"]),
    ]
    for encode, row, names in cases:
        heads = [line for line in example_lines(encode, encode(row), row) if line.startswith("row 0")]
        assert [head.split(":")[0] for head in heads] == [f"row 0{name}" for name in names]


def test_lines_are_wrapped_cut_in_the_middle_and_safe_for_a_terminal():
    assert text_lines([("abcd\n\n\x1b[31m\t", False), ("ef", True)], width=3) == [
        "  | abc", "  | d\\n", "  | \\n", "  | \\x1b", "  | [31", "  | m\\t", "  + ef",
    ]  # fmt: skip
    many = text_lines([("a\n" * 100, False)], most=9)
    assert len(many) == 10 and many[6] == "  ... 91 lines left out ..."


def test_no_line_breaks_inside_a_special_token():
    encode = PromptEncoder(byte_tokenizer(), apply_chat_template=True)
    for length in range(20):
        lines = prompt_lines(encode, encode({"prompt": "x" * length}), width=20)
        text = "".join(line[4:] for line in lines if line.startswith("  | "))
        marks = [mark for line in lines for mark in ("<|im_start|>", "<|im_end|>") if mark in line]
        assert len(marks) == text.count("<|im_") == 3 and all(len(line) <= 24 for line in lines if line[2] == "|")
