"""`whet serve`: its settings, what it prints, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from helpers import full, tiny_model

from whet.cli import main
from whet.config.serve import ServeConfig, check_serve, load_serve
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError


def test_the_model_may_be_the_first_word():
    assert load_serve(["m", "temperature=0", "port=0"]) == ServeConfig(model="m", temperature=0.0, port=0)
    assert load_serve(["model=m"]).model == "m" and load_serve([]).temperature == 1.0
    with pytest.raises(ConfigError, match="both name a model"):
        load_serve(["m", "model=n"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no model; write whet serve MODEL"),
        ({"model": "m", "port": 70000}, "port=70000: expected 0 to 65535"),
        ({"model": "m", "generation_kwargs": {"top_h": 0.5}}, "does not take them"),
        ({"model": "m", "seed": 1}, "a seed of its own"),
    ],
)
def test_wrong_settings_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        check_serve(ServeConfig(**fields))


def test_a_host_that_others_reach_needs_a_key(capsys):
    assert main(["serve", "m", "host=0.0.0.0", "api_key="]) == 2
    assert "other machines can reach it, so it needs an API key" in capsys.readouterr().err


@pytest.mark.parametrize("end", [signal.SIGINT, full(signal.SIGTERM)])
def test_the_command_serves_until_it_is_ended(tmp_path, end):
    tiny_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    if end == signal.SIGINT:
        environment = {name: value for name, value in os.environ.items() if name != "WHET_API_KEY"}
    else:
        environment = {**os.environ, "WHET_API_KEY": "from-the-environment"}
    command = [sys.executable, "-m", "whet", "serve", str(tmp_path), "port=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            url, key = lines[0].strip(), re.search("API key: (.*)", "".join(lines))[1]
            if end == signal.SIGTERM:
                assert key == "the one that was set"
                key = "from-the-environment"
            request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=20) as response:
                assert str(tmp_path) in response.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/models", timeout=20)
            process.send_signal(end)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "GET /v1/models 200: ok" in errors and "GET /v1/models 401" in errors and "stopped" in errors
