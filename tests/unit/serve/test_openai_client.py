"""The official `openai` client against `whet serve`."""

import pytest
from chat_templates import TOOLS
from served import ADD, CALL, HI, KEY, saying, serving

from whet.data.tokenizer import byte_tokenizer

openai = pytest.importorskip("openai", reason="the openai client is not installed; pip install openai")


def client_of(server, key=KEY):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client():
    with serving() as server:
        yield client_of(server)


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_chat_with_choices_logprobs_seed_and_stop(client):
    ask = lambda **more: client.chat.completions.create(
        model="tiny", messages=HI, n=2, seed=7, max_completion_tokens=12, logprobs=True, **more
    )
    first, again = ask(), ask()
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    entry = first.choices[0].logprobs.content[0]
    assert entry.logprob <= 0 and first.choices[0].finish_reason in ("stop", "length")
    assert "token_ids" in ask(extra_body={"return_token_ids": True}).choices[0].model_extra


def test_a_stream_of_chat_adds_up(client):
    whole = client.chat.completions.create(model="tiny", messages=HI, seed=7, max_tokens=20)
    with client.chat.completions.create(
        model="tiny", messages=HI, seed=7, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage


def test_completions(client):
    done = client.completions.create(model="tiny", prompt=["ab", "c"], max_tokens=5, seed=1, logprobs=0)
    assert len(done.choices) == 2 and len(done.choices[0].logprobs.token_logprobs) <= 5
    streamed = client.completions.create(model="tiny", prompt="ab", max_tokens=5, seed=1, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == done.choices[0].text


def test_errors_are_the_client_s_own_classes(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=HI)
    with pytest.raises(openai.BadRequestError, match="context length"):
        client.completions.create(model="tiny", prompt="a" * 2000)
    with pytest.raises(openai.AuthenticationError, match="wrong or missing API key"):
        client.with_options(api_key="wrong").models.list()


def test_tools_and_their_streams():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS
    answer = lambda prompt: "five" if "tool_response" in prompt else CALL
    with serving(engine=saying(answer), tokenizer=tokenizer) as server:
        client = client_of(server)
        ask = {"model": "tiny", "tools": [ADD]}
        message = client.chat.completions.create(messages=HI, **ask).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "add" and call.function.arguments == '{"a": 2, "b": 3}'
        replies = [message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        assert client.chat.completions.create(messages=HI + replies, **ask).choices[0].message.content == "five"
        with client.chat.completions.stream(messages=HI, **ask) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.name == "add"
        assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_response_formats(client, kind):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": kind, **({"json_schema": {"name": "x", "schema": schema}} if kind == "json_schema" else {})}
    done = client.chat.completions.create(model="tiny", messages=HI, response_format=form, max_tokens=200, seed=1)
    assert done.choices[0].message.content.startswith("{")
