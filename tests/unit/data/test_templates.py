"""A chat template is a program of somebody else's."""

import signal

import pytest

from whet.config import SupervisedDataConfig
from whet.data import templates
from whet.data.prompts import PromptEncoder
from whet.data.supervised import SFTEncoder
from whet.data.templates import ChatTemplate
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError


def test_a_template_that_loops_is_ended_and_named(monkeypatch):
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(templates, "LIMIT_S", 0.2)
    template = ChatTemplate(byte_tokenizer(), {"chat_template": loop})
    with pytest.raises(ConfigError, match=r"row 3: the chat template '\{% for a.*not ended within 0.2 s.*repair"):
        template.text([{"role": "user", "content": "hi"}], row=3)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_of_rows_rendered_together_the_one_that_loops_is_named(monkeypatch):
    loops = "{% for m in messages %}{{ m.content }}{% if m.content == 'on' %}{% for a in range(99999) %}"
    loops += "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
    monkeypatch.setattr(templates, "LIMIT_S", 0.2)
    encode = PromptEncoder(byte_tokenizer(), apply_chat_template=True, chat_template_kwargs={"chat_template": loops})
    rows = [{"prompt": text, "response": "b"} for text in ("a", "b", "on", "on")]
    with pytest.raises(ConfigError, match=r"row 7: .* has not ended within 0.2 s"):
        encode.encode_batch(rows, 5)
    data = SupervisedDataConfig(apply_chat_template=True, chat_template_kwargs={"chat_template": loops})
    with pytest.raises(ConfigError, match=r"row 7: .* has not ended within 0.2 s"):
        SFTEncoder(byte_tokenizer(), data).encode_batch(rows, 5)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_alarm_s_handler_is_installed_once_for_a_stretch_of_rows(monkeypatch):
    installed, install = [], signal.signal
    monkeypatch.setattr(signal, "signal", lambda *args: installed.append(args) or install(*args))
    SFTEncoder(byte_tokenizer()).encode_batch(
        [{"prompt": [{"role": "user", "content": str(n)}], "response": "b"} for n in range(9)]
    )
    assert len(installed) == 2  # and taken away
