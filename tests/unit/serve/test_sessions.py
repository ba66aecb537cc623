"""Sessions: what is matched is not encoded again, what is not forks, and each sampled token is in one sequence."""

import numpy as np
import pytest
from chat_templates import QWEN, QWEN3, TOOLS, tokenizer_with
from served import post, saying, send, serving

from whet.data.templates import ChatTemplate
from whet.envs.sessions import ChatRenderer, Session
from whet.rollout.base import Output


class Template(ChatRenderer):
    """A renderer of a chat template over bytes."""

    def __init__(self, text):
        tokenizer = tokenizer_with(text)
        super().__init__(tokenizer, ChatTemplate(tokenizer, {"enable_thinking": True}), [tokenizer.eos_token_id])
        self.encoded = []

    def encode(self, text):
        self.encoded.append(text)
        return super().encode(text)


def user(text):
    return {"role": "user", "content": text}


def said(text, *calls):
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def turn(session, messages, text, message=None, *, end=True, tools=()):
    """Runs one turn in which the model writes a text. Returns: the text of the prompt."""
    begun = session.begin(messages, tools, {})
    tokenizer = session.renderer.tokenizer
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, *([tokenizer.eos_token_id] if end else [])]
    columns = {"logprobs": np.full(len(ids), -0.5, np.float32), "versions": np.zeros(len(ids), np.int32)}
    output = Output(id=0, tokens=np.array(ids, np.int32), **columns, finish_reason="stop" if end else "length")
    session.end(begun, output, message or said(text))
    return tokenizer.decode(begun.tokens)


def sampled(session):
    """The texts of the sampled tokens, by sequence."""
    decode = session.renderer.tokenizer.decode
    return [
        [decode(part.tokens) for part in sequence.parts if isinstance(part, Output)] for sequence in session.sequences
    ]


def test_a_history_that_grows_is_one_sequence_and_only_the_new_text_is_encoded():
    session = Session(Template(QWEN))
    turn(session, [user("a")], "b")
    prompt = turn(session, [user("a"), said("b"), user("c")], "d")
    assert prompt == session.renderer.render([user("a"), said("b"), user("c")], (), {}, asks=True)
    turn(session, [user("a"), said("b"), user("c"), said("d"), user("e"), user("f")], "g")
    assert sampled(session) == [["b<|im_end|>", "d<|im_end|>", "g<|im_end|>"]] and session.forks == 0
    assert session.renderer.encoded[1:] == [
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\ne<|im_end|>\n<|im_start|>user\nf<|im_end|>\n<|im_start|>assistant\n",
    ]
    whole = session.sequences[0].as_dict()
    assert sum(whole["mask"]) == 6 and {v for v, m in zip(whole["versions"], whole["mask"]) if not m} == {-1}
    assert whole["messages"][-1] == said("g") and len(whole["logprobs"]) == len(whole["token_ids"])


def test_a_turn_without_its_end_gets_it_from_the_template():
    session = Session(Template(QWEN))
    turn(session, [user("a")], "b", end=False)
    prompt = turn(session, [user("a"), said("b"), user("c")], "d")
    assert prompt == session.renderer.render([user("a"), said("b"), user("c")], (), {}, asks=True)
    assert session.forks == 0


@pytest.mark.parametrize(
    "history",
    [
        [user("x"), said("b"), user("c")],
        [user("a"), said("B"), user("c")],
        [user("a"), user("c")],
        [said("b"), user("c")],
        [{"role": "system", "content": "s"}, user("a"), said("b"), user("c")],
    ],
)
def test_an_edited_history_forks(history):
    session = Session(Template(QWEN))
    turn(session, [user("a")], "b")
    prompt = turn(session, history, "d")
    assert prompt == session.renderer.render(history, (), {}, asks=True)
    assert sampled(session) == [["b<|im_end|>"], ["d<|im_end|>"]] and session.forks == 1


def test_two_answers_to_one_turn_share_their_context_and_no_sampled_token():
    session = Session(Template(QWEN))
    turn(session, [user("a")], "b")
    for text in ("d", "e"):
        turn(session, [user("a"), said("b"), user("c")], text)
    turn(session, [user("a"), said("b"), user("c"), said("e"), user("f")], "g")
    assert sampled(session) == [["b<|im_end|>", "d<|im_end|>"], ["e<|im_end|>", "g<|im_end|>"]]
    prefix = session.renderer.tokenizer.decode(session.sequences[1].prefix)
    assert prefix.endswith("b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n")


def test_of_two_equal_turns_the_one_that_nothing_follows_goes_on():
    session = Session(Template(QWEN))
    for _ in range(2):
        turn(session, [user("a")], "b")
    for text in "de":
        turn(session, [user("a"), said("b"), user("c")], text)
    assert sampled(session) == [["b<|im_end|>", "d<|im_end|>"], ["b<|im_end|>", "e<|im_end|>"]]


def test_other_tools_fork():
    session = Session(Template(TOOLS))
    turn(session, [user("a")], "b", tools=[{"name": "x"}])
    turn(session, [user("a"), said("b"), user("c")], "d", tools=[{"name": "y"}])
    assert session.forks == 1


def test_a_call_that_the_template_writes_otherwise_keeps_its_sampled_ids():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    written = '<tool_call>{"arguments":{"x":1},"name":"f"}</tool_call>'
    session = Session(Template(TOOLS))
    turn(session, [user("a")], written, said("", call))
    replayed = {**call, "id": "call_1"}
    prompt = turn(session, [user("a"), said("", replayed), {"role": "tool", "name": "f", "content": "2"}], "2")
    assert f"{written}<|im_end|>\n<|im_start|>user\n<tool_response>\n2" in prompt and session.forks == 0
    edited = {**call, "function": {"name": "f", "arguments": {"x": 2}}}
    session = Session(Template(TOOLS))
    turn(session, [user("a")], written, said("", call))
    turn(session, [user("a"), said("", edited), {"role": "tool", "name": "f", "content": "2"}], "2")
    assert session.forks == 1  # the agent has edited the call


def test_a_template_that_drops_earlier_thinking_forks():
    session = Session(Template(QWEN3))
    turn(session, [user("a")], "<think>\nhm\n</think>\n\nb")
    prompt = turn(session, [user("a"), said("<think>\nhm\n</think>\n\nb"), user("c")], "d")
    assert "hm" not in prompt and session.forks == 1
    assert sampled(session) == [["<think>\nhm\n</think>\n\nb<|im_end|>"], ["d<|im_end|>"]]


@pytest.mark.parametrize("by_path", [False, True])
def test_an_agent_s_calls_are_recorded_by_header_or_base_url(by_path):
    prompts = []
    with serving(engine=saying(lambda prompt: prompts.append(prompt) or f"answer {len(prompts)}")) as server:
        path = "/sessions/a%20b/v1/chat/completions" if by_path else "/v1/chat/completions"
        headers = {} if by_path else {"X-Session-ID": "a b"}
        messages = [{"role": "user", "content": "hi"}]
        for stream in (False, True):
            status, _, _ = send(server, "POST", path, {"messages": messages, "stream": stream}, **headers)
            assert status == 200
            messages = [*messages, {"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "and?"}]
        status, _, body = send(server, "GET", "/sessions/a%20b/trajectories")
        assert status == 200 and body["session"] == "a b"
        (trajectory,) = body["trajectories"]
        sampled = bytes(i for i, m in zip(trajectory["token_ids"], trajectory["mask"]) if m and i < 256).decode()
        assert sampled == "answer 1answer 2"
        assert [m["role"] for m in trajectory["messages"]] == ["user", "assistant", "user", "assistant"]
        assert send(server, "GET", "/sessions/other/trajectories")[0] == 404
        assert send(server, "GET", "/trajectories")[0] == 400
        assert post(server, "/v1/chat/completions", messages=messages)["choices"][0]["message"]["content"] == "answer 3"


def test_prompts_of_token_ids_continue_the_turn_that_they_begin_with():
    with serving() as server:
        ask = lambda ids: post(server, "/sessions/a/v1/completions", prompt=ids, max_tokens=3, return_token_ids=True)
        ids = list(b"count: ")
        first = ask(ids)["choices"][0]["token_ids"]
        second = ask([*ids, *first, *b" on "])["choices"][0]["token_ids"]
        ask([*ids, *first[:1], *b"?"])  # not what was sampled: another sequence
        _, _, body = send(server, "GET", "/sessions/a/trajectories")
    (one, two) = body["trajectories"]
    assert one["token_ids"] == [*first, *b" on ", *second]
    assert one["mask"] == [1] * len(first) + [0] * 4 + [1] * len(second)
    assert one["prompt_token_ids"] == ids and two["prompt_token_ids"] == [*ids, *first[:1], *b"?"]


def test_streamed_token_calls_are_recorded_whole():
    with serving() as server:
        body = {"token_ids": list(b"ab"), "sampling_params": {"max_tokens": 5, "ignore_eos": True}, "stream": True}
        send(server, "POST", "/sessions/a/inference/v1/generate", body)
        _, _, found = send(server, "GET", "/sessions/a/trajectories")
    (only,) = found["trajectories"]
    assert sum(only["mask"]) == 5 and only["prompt_token_ids"] == list(b"ab")
