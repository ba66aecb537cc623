"""A chat template is a program of somebody else's."""

import signal

import pytest

from whet.data import templates
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
