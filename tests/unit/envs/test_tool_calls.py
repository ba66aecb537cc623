"""Tool calls are read in the form in which a chat template writes them."""

import json
from pathlib import Path

import pytest
from chat_templates import GEMMA, QWEN, SMOLLM, TOOLS, tokenizer_with

from whet.data.tokenizer import byte_tokenizer
from whet.envs.tool_calls import CALL_FORMS, ToolTemplate
from whet.errors import ConfigError

XML = TOOLS.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n',
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n"
    "</parameter>\n{% endfor %}</function>\n",
)
BLOCKS = TOOLS.replace("<tool_call>", "```json").replace("</tool_call>", "```")
LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start|>assistant<|end|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot|>{% else %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n{{ m.content }}<|eot|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
ARGUMENTS = {"city": "Bern", "days": 3, "exact": True, "places": [{"a": 1}], "text": 'a "}" \\ é\nb'}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "places": {"type": "array"},
                "text": {"type": "string"},
            },
        },
    },
}


def reader(text):
    tokenizer = tokenizer_with(text)
    end = "<|eot|>" if "<|eot|>" in text else "<|im_end|>"
    return ToolTemplate(tokenizer, {}, [tokenizer.convert_tokens_to_ids(end)]), end


def read(template, text, end, tools=(SCHEMA,)):
    tokenizer = template.tokenizer
    context = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=True, return_dict=False, add_generation_prompt=True
    )
    return template.parse(tokenizer(text + end, add_special_tokens=False).input_ids, context, tools)


def functions(message):
    return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]


def as_json(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


def as_xml(name, arguments):
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CASES = {
    "hermes": (TOOLS, lambda name, arguments: f"<tool_call>\n{as_json(name, arguments)}\n</tool_call>"),
    "json blocks": (BLOCKS, lambda name, arguments: f"```json\n{as_json(name, arguments)}\n```"),
    "qwen3_coder": (XML, as_xml),
    "llama3_json": (LLAMA, lambda name, arguments: as_json(name, arguments, "parameters")),
    "llama3_json, python tag": (
        LLAMA,
        lambda n, a: "<|python_tag|>" + as_json(n, a, "parameters"),
    ),
    "llama3_json, arguments": (LLAMA, as_json),
    "llama3_json, type": (LLAMA, lambda n, a: json.dumps({"type": "function", "name": n, "parameters": a})),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_is_read_with_its_types(case):
    text, write = CASES[case]
    template, end = reader(text)
    message = read(template, write("weather", ARGUMENTS), end)
    assert functions(message) == [("weather", ARGUMENTS)] and message["content"] == ""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("between", ["\n", "", "; "])
def test_several_calls_of_one_turn_are_read(case, between):
    text, write = CASES[case]
    if between == "; " and "llama" not in case:
        pytest.skip("only Llama's calls may have a semicolon between them")
    template, end = reader(text)
    calls = between.join([write("weather", {"city": "a"}), write("weather", {"city": "b"})])
    assert functions(read(template, calls, end)) == [("weather", {"city": "a"}), ("weather", {"city": "b"})]


@pytest.mark.parametrize("case", ["hermes", "json blocks", "qwen3_coder"])
def test_text_before_a_call_is_the_content(case):
    text, write = CASES[case]
    template, end = reader(text)
    message = read(template, "I look.\n" + write("weather", {"city": "a"}), end)
    assert message["content"] == "I look." and functions(message) == [("weather", {"city": "a"})]


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_call_is_text(case):
    text, _ = CASES[case]
    template, end = reader(text)
    for turn in ("It is {sunny}.", '<tool_call>\n{"name": "weath', ""):
        message = read(template, turn, end)
        assert functions(message) == [] and message["role"] == "assistant"
        assert message["content"].strip() in (turn.strip(), turn.removeprefix("<tool_call>").strip())


def test_a_template_that_writes_calls_in_an_unknown_form_is_refused():
    with pytest.raises(ConfigError, match=r"nor as qwen3_coder, llama3_json; set tokenizer\.response_template"):
        reader(
            TOOLS.replace(
                '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
                "{{ c.function.name }} with {{ c.function.arguments }}",
            )
        )
    for template in (QWEN, SMOLLM, GEMMA):
        with pytest.raises(ConfigError, match="does not support tool calling"):
            reader(template)
    assert list(CALL_FORMS) == ["qwen3_coder", "llama3_json"]


REAL = ["glm4moe", "llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_6", "qwen3_instruct_2507"]


@pytest.mark.parametrize("name", REAL)
def test_real_templates(name):
    trl = pytest.importorskip("trl")
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this release of trl has no {path.name}")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot_id|>", "<|im_end|>", "<|user|>"]})
    tokenizer.chat_template = path.read_text()
    end = "<|eot_id|>" if "llama" in name else "<|im_end|>"
    call = lambda city: {"type": "function", "function": {"name": "weather", "arguments": {"city": city, "days": 3}}}
    user = {"role": "user", "content": "?"}
    if name == "glm4moe":
        with pytest.raises(ConfigError, match="response_template"):
            ToolTemplate(tokenizer, {}, [tokenizer.convert_tokens_to_ids(end)])
        return
    template = ToolTemplate(tokenizer, {}, [tokenizer.convert_tokens_to_ids(end)])
    turn = [user, {"role": "assistant", "content": "", "tool_calls": [call("Bern")]}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, tools=[SCHEMA])
    anchor = template.response_template["start_anchor"]
    message = read(template, text.rpartition(anchor)[2].rpartition(end)[0].strip(), end)
    assert functions(message) == [("weather", {"city": "Bern", "days": 3})]
