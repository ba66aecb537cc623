"""A server of a tiny model on loopback, for tests."""

import http.client
import json
from contextlib import contextmanager

from helpers import tiny_model

from whet import Sampler
from whet.config.serve import ServeConfig
from whet.data.tokenizer import byte_tokenizer
from whet.rollout.queue_engine import SimpleEngine
from whet.serve import server as server_module

KEY = "a-key"
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@contextmanager
def serving(sampler=None, *, key=KEY, tokenizer=None, engine="embedded", **fields):
    """The server of a tiny model, answering."""
    if sampler is None:
        model = tiny_model(max_position_embeddings=1024)
        sampler = Sampler(model, tokenizer or byte_tokenizer(), rollout_engine=engine)
    with server_module.serving(sampler, ServeConfig(model="tiny", port=0, api_key=key or "", **fields)) as server:
        yield server


def saying(answer):
    """An engine that gives a text to each prompt. Args: answer: of the prompt's text."""

    class Saying(SimpleEngine):
        samples = ("temperature", "top_p")

        def complete(self, request):
            text = answer(bytes(i for i in request.tokens.tolist() if i < 256).decode())
            ids = [*text.encode(), request.sampling.stop_ids[0]][: request.sampling.max_tokens]
            return ids, [-0.5] * len(ids)

    return Saying


def send(server, method, path, body=None, key=KEY, **headers):
    """(status, headers, body) of a request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, data, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, response.headers, json.loads(text) if is_json else text


def post(server, path, **body):
    """The body of a response that must be 200."""
    status, _, answer = send(server, "POST", path, body)
    assert status == 200, answer
    return answer


def events(text):
    """The events of a stream, without [DONE]."""
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]
