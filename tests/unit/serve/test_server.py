"""`whet serve`: routes, sampling, streams, errors, keys, disconnected clients."""

import http.client
import json
import logging
import socket
import threading
import time

import pytest
from chat_templates import TOOLS
from helpers import tiny_model
from served import ADD, CALL, HI, KEY, events, post, saying, send, serving

from whet import Sampler
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, EngineError
from whet.serve.server import ApiServer


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def encoded(server, messages):
    return server.model.sampler.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True, enable_thinking=False
    )


# ---- the routes ----------------------------------------------------------------------------------------------------


def test_models_and_health(server):
    status, _, body = send(server, "GET", "/v1/models")
    assert status == 200 and [card["id"] for card in body["data"]] == ["tiny"]
    assert body["data"][0]["max_model_len"] == 1024
    assert send(server, "GET", "/health", key=None)[0] == 200


def test_a_chat_completion_has_the_ids_text_and_logprobs_of_the_engine(server):
    body = post(
        server, "/v1/chat/completions", model="tiny", messages=HI, max_tokens=6, seed=3, temperature=1.0,
        logprobs=True, return_token_ids=True,
    )  # fmt: skip
    choice = body["choices"][0]
    assert body["object"] == "chat.completion" and body["prompt_token_ids"] == encoded(server, HI)
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == server.model.sampler.decode(choice["token_ids"])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(choice["token_ids"])}]
    same = post(
        server, "/inference/v1/generate", token_ids=body["prompt_token_ids"],
        sampling_params={"max_tokens": 6, "seed": 3, "temperature": 1.0, "logprobs": 0},
    )["choices"][0]  # fmt: skip
    assert same["token_ids"] == choice["token_ids"] and same["weight_versions"] == choice["weight_versions"]
    pairs = [(c["token_id"], c["logprob"]) for c in same["logprobs"]["content"]]
    assert [p[1] for p in pairs] == [c["logprob"] for c in choice["logprobs"]["content"]]
    assert [p[0] for p in pairs] == choice["token_ids"] and all(p[1] < 0 for p in pairs)


def test_choices_differ_and_a_seed_repeats_them_in_any_company(server):
    ask = lambda: post(server, "/v1/chat/completions", messages=HI, n=3, max_tokens=8, seed=5)
    results, threads = [], []
    alone = [c["message"]["content"] for c in ask()["choices"]]
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: results.append(ask())))
    other = threading.Thread(target=post, args=(server, "/v1/completions"), kwargs={"prompt": "x", "max_tokens": 40})
    for thread in (other, *threads):
        thread.start()
    for thread in (other, *threads):
        thread.join(30)
    assert len(set(alone)) > 1 and len(results) == 4
    assert all([c["message"]["content"] for c in r["choices"]] == alone for r in results)
    unseeded = {post(server, "/v1/completions", prompt="a", max_tokens=8)["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) > 1


def test_requests_of_several_clients_share_the_batch(server):
    before = server.loop.engine.stats()
    ask = lambda i: post(server, "/v1/completions", prompt=f"{i}", max_tokens=64, ignore_eos=True)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert server.loop.engine.stats().since(before).mean_batch_size > 2


def test_completions_take_texts_and_ids_and_lists_of_them(server):
    def texts(prompt, **fields):
        body = post(server, "/v1/completions", prompt=prompt, max_tokens=4, seed=1, **fields)
        return [c["text"] for c in body["choices"]], body["usage"]["prompt_tokens"]

    one, count = texts("ab")
    assert count == 2 and texts([97, 98]) == (one, 2)
    both, count = texts(["ab", "c"], n=2)
    assert len(both) == 4 and count == 3 and texts([[97, 98], [99]], n=2) == (both, 3)
    body = post(server, "/v1/completions", prompt="ab", max_tokens=4, logprobs=0, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98] and len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    lengths = [len(t) for t in choice["logprobs"]["tokens"]]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]


def test_a_stop_string_ends_the_text_before_it(server):
    free = post(server, "/v1/completions", prompt="ab", max_tokens=40, seed=2, ignore_eos=True)["choices"][0]["text"]
    stop = free[5:8]
    for stream in (False, True):
        status, _, answer = send(
            server, "POST", "/v1/completions",
            {"prompt": "ab", "max_tokens": 40, "seed": 2, "ignore_eos": True, "stop": stop, "stream": stream},
        )  # fmt: skip
        choices = [e["choices"][0] for e in (events(answer) if stream else [answer])]
        assert status == 200 and "".join(c["text"] for c in choices) == free[: free.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_the_default_length_is_the_room_in_the_context_and_max_tokens_is_checked():
    with serving(Sampler(tiny_model(), byte_tokenizer(), 60)) as server:
        body = post(server, "/v1/completions", prompt="a" * 40, ignore_eos=True)
        assert body["usage"]["completion_tokens"] == 20 and body["choices"][0]["finish_reason"] == "length"
        status, _, body = send(server, "POST", "/v1/completions", {"prompt": "a" * 40, "max_tokens": 21})
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        assert "40 tokens in the prompt and 21 of max_tokens" in body["error"]["message"]


# ---- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_same_tokens_in_several_chunks(server):
    body = {"messages": HI, "max_tokens": 24, "seed": 3, "ignore_eos": True, "logprobs": True, "return_token_ids": True}
    whole = post(server, "/v1/chat/completions", **body)["choices"][0]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, text = send(server, "POST", "/v1/chat/completions", body)
    assert status == 200 and headers.get_content_type() == "text/event-stream"
    *chunks, usage = events(text)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    choices = [c["choices"][0] for c in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and len(choices) > 3
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
    assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]
    logprobs = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [c["finish_reason"] for c in choices][-1] == "length" and choices[0]["finish_reason"] is None


def test_ids_can_be_streamed(server):
    body = {"token_ids": [97, 98], "sampling_params": {"max_tokens": 12, "seed": 1, "ignore_eos": True, "n": 2}}
    whole = post(server, "/inference/v1/generate", **body)
    chunks = events(send(server, "POST", "/inference/v1/generate", {**body, "stream": True})[2])
    for index in (0, 1):
        ids = [c["choices"][0]["token_ids"] for c in chunks if c["choices"][0]["index"] == index]
        assert [i for part in ids for i in part] == whole["choices"][index]["token_ids"]


# ---- tools ---------------------------------------------------------------------------------------------------------


def tool_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS
    return tokenizer


def test_tool_calls_are_parsed_and_answers_reach_the_template():
    prompts = []

    def answer(prompt):
        prompts.append(prompt)
        return "It is 5." if "tool_response" in prompt else f"Let me see.\n{CALL}"

    with serving(engine=saying(answer), tokenizer=tool_tokenizer()) as server:
        body = {"messages": HI, "tools": [ADD]}
        choice = post(server, "/v1/chat/completions", **body)["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and '"name": "add"' in prompts[0]
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_")
        assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        replies = [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
        last = post(server, "/v1/chat/completions", messages=HI + replies, tools=[ADD])["choices"][0]
        assert last["message"] == {"role": "assistant", "content": "It is 5."} and last["finish_reason"] == "stop"
        assert CALL in prompts[-1] and "<tool_response>\n5\n</tool_response>" in prompts[-1]
        chunks = events(send(server, "POST", "/v1/chat/completions", {**body, "stream": True})[2])
        deltas = [c["choices"][0] for c in chunks]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        assert deltas[-1]["delta"]["tool_calls"][0]["function"]["name"] == "add"
        none = post(server, "/v1/chat/completions", **body, tool_choice="none")["choices"][0]
        assert "tool_calls" not in none["message"] and "<tool_call>" in none["message"]["content"]


def test_thinking_is_apart_from_the_content_of_a_chat_completion():
    answer = lambda prompt: "5 " if "again" in prompt else "<think>\n2 and 3\n</think>\n\n5"
    with serving(engine=saying(answer), tokenizer=tool_tokenizer()) as server:
        first, second = (
            post(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}])["choices"][0]["message"]
            for text in ("2+3=", "again")
        )
    assert first == {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    assert second == {"role": "assistant", "content": "5 "}


@pytest.mark.parametrize(
    ("asked", "said", "thought", "content"),
    [
        ("2+3=", "<think>\n2 and 3\n</think>\n\n5 < 6\n", "2 and 3", "5 < 6\n"),
        ("2+3=<think>\n", "2 and\n\n3\n</think>\n5", "2 and\n\n3", "5"),
        ("2+3=", "<thin ice> </think> ", "", "<thin ice> </think> "),
        ("2+3=", "<think>2 and", "2 and", ""),
        ("2+3=", " ", "", " "),
    ],
)
def test_a_stream_has_the_thinking_apart_and_a_session_goes_on_behind_it(asked, said, thought, content):
    tokens = tool_tokenizer()
    tokens.chat_template = (
        "{% for m in messages %}{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    with serving(engine=saying(lambda prompt: "Yes." if "sure" in prompt else said), tokenizer=tokens) as server:
        path, messages = "/sessions/a/v1/chat/completions", [{"role": "user", "content": asked}]
        chunks = events(send(server, "POST", path, {"messages": messages, "stream": True})[2])
        deltas = [c["choices"][0]["delta"] for c in chunks]
        told = {key: "".join(d.get(key) or "" for d in deltas) for key in ("reasoning_content", "content")}
        assert told == {"reasoning_content": thought, "content": content}
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "sure?"}]
        post(server, path, messages=messages)
        (trajectory,) = send(server, "GET", "/sessions/a/trajectories")[2]["trajectories"]
    assert sum(trajectory["mask"]) == len(said) + len("Yes.") + 2


def test_tools_need_a_template_that_has_them(server):
    status, _, body = send(server, "POST", "/v1/chat/completions", {"messages": HI, "tools": [ADD]})
    assert status == 400 and "does not support tool calling" in body["error"]["message"]


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", b"{", 400, "the body is not JSON"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "the body is not JSON"),
        ("/v1/completions", rb'{"prompt": "\ud83d"}', 400, "surrogates not allowed"),
        ("/v1/chat/completions", {"model": "tiny"}, 400, "the parameter 'messages' is missing"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages="),
        ("/v1/chat/completions", {"messages": HI, "temprature": 1}, 400, "unknown parameter 'temprature'"),
        ("/v1/chat/completions", {"messages": HI, "temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": HI, "n": 0}, 400, "n=0"),
        ("/v1/chat/completions", {"messages": HI, "model": "gpt"}, 404, "no model 'gpt'; this server has 'tiny'"),
        (
            "/v1/chat/completions",
            {"messages": HI, "frequency_penalty": 0.5},
            400,
            "frequency_penalty=0.5: this server does not implement it",
        ),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, 400, "messages.0 has no role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0 has no content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "reads text only",
        ),
        ("/v1/completions", {"prompt": ""}, 400, "the prompt has no tokens"),
        ("/v1/completions", {"prompt": [99999]}, 400, "99999"),
        ("/v1/completions", {"prompt": "ab " * 10**6}, 400, "has a prompt of 3000000 characters"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "ab " * 10**6}]},
            400,
            "has a prompt of 30000",
        ),
        ("/v1/embeddings", {"input": "a"}, 404, "no route POST /v1/embeddings; there are /v1/models"),
        ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_have_openai_s_form_and_the_connection_goes_on(server, path, body, status, message):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(2):
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert response.status == status and message in error["message"], error
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"


def test_an_error_of_the_engine_is_a_500_and_the_next_request_is_served(monkeypatch, caplog):
    def answer(prompt):
        if "break" in prompt:
            raise EngineError("out of memory")
        return "fine"

    with serving(engine=saying(answer)) as server:
        for stream in (False, True):
            status, _, body = send(server, "POST", "/v1/completions", {"prompt": "break", "stream": stream})
            assert status == 500 and body["error"]["message"] == "out of memory"
            assert body["error"]["type"] == "server_error"
        assert post(server, "/v1/completions", prompt="a")["choices"][0]["text"] == "fine"


def test_the_key_is_wanted_and_only_beyond_loopback_it_must_be(server):
    for key in (None, "wrong", "é"):
        status, _, body = send(server, "GET", "/v1/models", key=key)
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0: other machines can reach it, so it needs an API key"):
        ApiServer("0.0.0.0", 0, None)
    with pytest.raises(ConfigError, match="can't be bound"):
        ApiServer("127.0.0.1", server.server_address[1], None)


def test_without_a_key_another_host_s_name_is_refused():
    with serving(key=None) as server:
        assert send(server, "GET", "/v1/models", key=None)[0] == 200
        assert send(server, "GET", "/v1/models", key=None, Host="evil.example")[0] == 403


# ---- clients that go away, and the end -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_is_cancelled(stream, caplog):
    caplog.set_level(logging.INFO, logger="whet")
    with serving() as server:
        body = json.dumps({"prompt": "a", "stream": stream, "max_tokens": 1000, "ignore_eos": True, "n": 8})
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        with socket.create_connection(server.server_address[:2]) as client:
            client.sendall(request.encode())
            deadline = time.monotonic() + 20
            while not server.loop.engine.stats().live and time.monotonic() < deadline:
                time.sleep(0.01)
        while server.loop.engine.stats().in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = server.loop.engine.stats()
        assert stats.in_flight == 0 and stats.generated < 8 * 1000
        assert post(server, "/v1/completions", prompt="a", max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert any("499" in line and "the client disconnected" in line for line in caplog.messages)


def test_waiting_clients_are_told_when_the_server_ends():
    answers = []
    with serving() as server:
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 8}
        thread = threading.Thread(target=lambda: answers.append(send(server, "POST", "/v1/completions", body)))
        thread.start()
        deadline = time.monotonic() + 20
        while not server.loop.engine.stats().live and time.monotonic() < deadline:
            time.sleep(0.01)
    thread.join(10)
    (status, _, body) = answers[0]
    assert status == 503 and "shutting down" in body["error"]["message"]


def test_a_session_reuses_its_kv_and_each_request_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="whet")
    with serving() as server:
        ask = {"prompt": list(range(60, 120)), "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        headers = {"X-Session-ID": "a"}
        choice = send(server, "POST", "/v1/completions", ask, **headers)[2]["choices"][0]
        longer = [*ask["prompt"], *choice["token_ids"], 65, 66]
        reused = []
        for names in (headers, {}):
            before = server.loop.engine.stats()
            send(server, "POST", "/v1/completions", {**ask, "prompt": longer}, **names)
            reused.append(server.loop.engine.stats().since(before).reused)
        assert reused[0] > 60 and reused[1] == 0
    lines = [line for line in caplog.messages if line.startswith("POST")]
    assert "1 choice, 60 prompt + 8 completion tokens" in lines[0] and "[session a]" in lines[0]
