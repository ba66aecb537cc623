"""`whet chat`: the conversation, its commands, and the loop around it."""

import io
import os
import signal
import sys

import numpy as np
import pytest
from helpers import tiny_model

from whet import Sampler
from whet.cli import main
from whet.cli.chat import Chat, _read_lines, chat
from whet.config.generate import ChatConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.rollout.base import PartialOutput


@pytest.fixture(scope="module")
def sampler(tokenizer):
    return Sampler(tiny_model(max_position_embeddings=256), tokenizer)


@pytest.fixture
def asked(sampler, monkeypatch):
    """The ids of every prompt that was completed."""
    seen, stream = [], Sampler.stream

    def noting(self, prompt, *args, **options):
        seen.append((prompt.tokens.tolist(), options["conversation"]))
        return stream(self, prompt, *args, **options)

    monkeypatch.setattr(Sampler, "stream", noting)
    return seen


def talk(sampler, **fields):
    return Chat(sampler, ChatConfig(**{"max_tokens": 6, "seed": 1, **fields}))


def say(chat, text):
    return "".join(chat.say(text))


def rendered(sampler, messages):
    return sampler.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=True, enable_thinking=False
    )


def test_a_turn_is_put_behind_the_ids_of_the_one_before(sampler, asked):
    c = talk(sampler, forbidden_tokens=(257, 258))  # special tokens within an answer are not part of its text
    first = say(c, "hi")
    held = c._ids.tolist()
    say(c, "and?")
    assert asked[0][0] == rendered(sampler, [{"role": "user", "content": "hi"}])
    assert asked[1][0][: len(held)] == held and asked[0][1] == asked[1][1]
    assert [m["content"] for m in c.messages[:3]] == ["hi", first, "and?"]
    rest = bytes(i for i in asked[1][0][len(held) :] if i < 256).decode()
    assert rest.endswith("user\nand?\nassistant\n")


def test_a_turn_runs_the_template_once(sampler, asked, monkeypatch):
    c, runs = talk(sampler, forbidden_tokens=(257, 258)), []
    render = type(sampler.tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(sampler.tokenizer),
        "apply_chat_template",
        lambda self, *a, **o: runs.append(len(a[0])) or render(self, *a, **o),
    )
    say(c, "hi")
    say(c, "and?")
    assert runs == [1, 3] and len(asked) == 2


def test_what_is_no_text_is_refused_in_every_turn_and_not_part_of_the_conversation(sampler):
    c = talk(sampler)
    for count in (0, 2):
        with pytest.raises(DataError, match="not valid text"):
            say(c, "a\udcff")
        assert len(c.messages) == count
        say(c, "hi")


def test_answers_that_are_text_make_the_ids_of_the_template(sampler, asked, monkeypatch):
    c = talk(sampler)
    end = sampler.eos_ids[0]
    answer = np.array([*b"good day", end], np.int32)
    empty = np.zeros(9, np.float32)
    done = PartialOutput(id=0, tokens=answer, logprobs=empty, versions=empty.astype(np.int32), finish_reason="stop")
    with monkeypatch.context() as m:
        m.setattr(Sampler, "stream", lambda *_, **__: iter([done]))
        assert say(c, "hi") == "good day"
    say(c, "and?")
    assert asked[0][0] == rendered(sampler, c.messages[:-1])


def test_a_template_that_rewrites_answers_is_followed(sampler, asked):
    own = byte_tokenizer()
    own.chat_template = "{% for m in messages %}[{{ m['content'] | length }}]{{ m['role'] }} {% endfor %}"
    c = talk(Sampler(sampler.loaded, own))
    say(c, "hi")
    say(c, "and?")
    assert asked[1][0] == own.apply_chat_template(c.messages[:3], return_dict=False)


def test_without_a_template_the_text_goes_on(sampler, asked):
    own = byte_tokenizer()
    own.chat_template = None
    c = talk(Sampler(sampler.loaded, own))
    say(c, "2+2=")
    held = c._ids.tolist()
    say(c, ", so")
    assert asked[0][0] == list(b"2+2=") and asked[1][0] == [*held, *b", so"]
    with pytest.raises(ConfigError, match="system_prompt needs the chat template"):
        talk(Sampler(sampler.loaded, own), system_prompt="be kind")


def test_the_same_seed_tells_the_same_conversation(sampler):
    told = [[say(c, "hi"), say(c, "hi")] for c in (talk(sampler, temperature=1.0), talk(sampler, temperature=1.0))]
    assert told[0] == told[1] and told[0][0] != told[0][1]
    free = {say(talk(sampler, temperature=1.0, seed=None), "hi") for _ in range(4)}
    assert len(free) > 1


def test_a_stopped_answer_stays_as_far_as_it_went(sampler):
    c = talk(sampler, max_tokens=40, eos_tokens=[1])
    answer = c.say("hi")
    next(answer)
    answer.close()
    assert [m["role"] for m in c.messages] == ["user", "assistant"] and len(c._ids) > 0
    assert sampler.engine(c._sampling()).stats().in_flight == 0
    assert say(c, "and?") is not None and len(c.messages) == 4


def test_a_conversation_that_outgrows_the_model_is_an_error_that_names_the_way_on(sampler, asked):
    c = talk(sampler, system_prompt="be", max_tokens=8)
    said = []
    with pytest.raises(DataError, match=r"over the limit of 256.*; /reset starts a new conversation"):
        for i in range(8):
            said.append(say(c, f"{i}" * 20))
    assert all(len(tokens) + 8 <= 256 for tokens, _ in asked)
    assert len(said) > 1 and len(c.messages) == 1 + 2 * len(said)  # what did not fit is not part of it
    c.reset()
    with pytest.raises(DataError, match="over the limit of 256"):
        say(c, "x" * 300)
    assert c.messages == [{"role": "system", "content": "be"}]
    assert say(c, "still here") is not None


def test_commands(sampler):
    c = talk(sampler, system_prompt="be kind")
    say(c, "hi")
    assert c.command("/reset") == "a new conversation starts"
    assert c.messages == [{"role": "system", "content": "be kind"}]
    assert "temperature=0.1, " in c.command("/set temperature=0.1 max_tokens=3") and c.config.max_tokens == 3
    c.command("/set temperature 0.2")
    c.command("/set stop='a b'")
    assert (c.config.temperature, c.config.stop) == (0.2, ("a b",))
    assert c.command("/set") == c.command("/set seed=1") and c.command("/quit") is None
    assert len(c.messages) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/rest", "unknown command '/rest'; did you mean /reset"),
        ("/help", "unknown command '/help'.* Known: /quit, /reset, /set"),
        ("/set temprature=1", "unknown setting 'temprature'; did you mean temperature"),
        ("/set model=x", "unknown setting 'model'"),
        ("/set temperature=hot", "temperature: expected a number"),
        ("/set temperature=0 top_p=0.5", "top_p=0.5 would do nothing"),
        ("/set generation_kwargs='{num_bemas: 2}'", "did you mean num_beams"),
    ],
)
def test_commands_that_are_wrong_change_nothing(sampler, line, words):
    c = talk(sampler)
    before = c.config
    with pytest.raises(ConfigError, match=words):
        c.command(line)
    assert c.config == before


def test_lines_of_a_pipe_are_answered_on_standard_output_alone(model_folder, monkeypatch, capsys):
    lines = "hi\n\n/set temperature=0\nfoo bar\n/nothing\n/reset\nhi\n/quit\nnever\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", f"model={model_folder}", "max_tokens=4", "seed=1"]) == 0
    out, err = capsys.readouterr()
    sampler = Sampler(model_folder)
    c = talk(sampler, max_tokens=4)
    expected = [say(c, "hi")]
    c.command("/set temperature=0")
    expected.append(say(c, "foo bar"))
    c.reset()
    expected.append(say(c, "hi"))
    assert out == "".join(f"{text}\n" for text in expected)
    assert "unknown command '/nothing'" in err and "a new conversation starts" in err


def test_lines_that_are_no_text_are_an_error_in_words(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n\xff\n"), encoding="utf-8"))
    with pytest.raises(DataError, match="standard input is not utf-8 text"):
        list(_read_lines(False))


def test_the_end_of_a_pipe_ends_the_chat(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert main(["chat", f"model={model_folder}", "max_tokens=4", "temperature=0"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_a_model_without_a_template_is_announced(model_folder, tmp_path, monkeypatch, capsys, caplog):
    own = byte_tokenizer()
    own.chat_template = None
    own.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=\n"))
    config = ChatConfig(model=model_folder, tokenizer=str(tmp_path), max_tokens=4, temperature=0.0)
    chat(config)
    assert "has no chat template" in caplog.text
    assert capsys.readouterr().out == Sampler(model_folder)("2+2=", 4).text[0] + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_chat(model_folder, monkeypatch, capsys):
    say_as_before, calls = Chat.say, []

    def interrupted(self, text):
        for piece in say_as_before(self, text):
            calls.append(piece)
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(Chat, "say", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nagain\n"))
    before = signal.getsignal(signal.SIGINT)
    assert main(["chat", f"model={model_folder}", "max_tokens=30", "seed=1", "eos_tokens=[1]"]) == 0
    assert "[stopped]" in capsys.readouterr().err and len(calls) > 1
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_without_a_model_says_so(capsys):
    assert main(["chat"]) == 2
    assert capsys.readouterr().err == "whet chat: no model; write model=<folder, run folder or hub name>\n"


def test_the_template_can_be_left_out_and_can_not_be_made_up(sampler, asked):
    say(talk(sampler, apply_chat_template=False), "2+2=")
    assert asked[0][0] == list(b"2+2=")
    own = byte_tokenizer()
    own.chat_template = None
    with pytest.raises(ConfigError, match="apply_chat_template=true, but"):
        talk(Sampler(sampler.loaded, own), apply_chat_template=True)


def test_a_next_turn_encodes_only_what_is_new(tokenizer):
    s = Sampler(tiny_model(max_position_embeddings=256), tokenizer)
    c = talk(s, forbidden_tokens=(257, 258))
    engine = s.engine(c._sampling())
    say(c, "x" * 40)
    first = engine.stats()
    say(c, "y")
    second = engine.stats().since(first)
    assert second.reused > 60 and second.prefilled < 40


def test_no_turn_draws_with_the_numbers_of_another(sampler, monkeypatch):
    seen, stream = [], Sampler.stream

    def noting(self, prompt, *args, **options):
        seen.append((options["seed"], options["place"]))
        return stream(self, prompt, *args, **options)

    monkeypatch.setattr(Sampler, "stream", noting)
    c = talk(sampler, temperature=1.0)
    for text in ("hi", "and?", "so?"):
        say(c, text)
    assert seen == [(1, 0), (1, 1), (1, 2)]


def test_a_turn_that_did_not_fit_leaves_no_trace(sampler):
    c = talk(sampler)
    say(c, "hi")
    before = (c.messages, c._ids.tolist(), c._text)
    with pytest.raises(DataError, match="over the limit of 256"):
        say(c, "x" * 300)
    assert (c.messages, c._ids.tolist(), c._text) == before  # its text too: else the next turn is encoded all again
