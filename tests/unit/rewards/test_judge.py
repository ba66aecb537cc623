"""A judge model as a reward: its prompt, cache, retries, time limit and budget, against a server on loopback."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from whet.errors import ConfigError, RewardError
from whet.rewards import JudgeModel
from whet.rewards.call import RewardInputs, call_rewards


class Judge:
    """A server that grades; `answers` are (status, reply) or seconds to wait, the last one repeated."""

    def __init__(self, *answers):
        self.answers, self.bodies, self.keys = list(answers), [], []
        self.lock = threading.Lock()
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with judge.lock:
                    judge.bodies.append(body)
                    judge.keys.append((self.path, self.headers["Authorization"]))
                    answer = judge.answers.pop(0) if len(judge.answers) > 1 else judge.answers[0]
                if isinstance(answer, float):
                    time.sleep(answer)
                    return
                status, reply = answer
                text = reply(body) if callable(reply) else reply
                message = {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 10}}
                data = json.dumps(message if status == 200 else {"error": text}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def judges():
    made = []

    def make(*answers):
        made.append(Judge(*answers))
        return made[-1]

    yield make
    for judge in made:
        judge.server.shutdown()
        judge.server.server_close()


def rewards(judge, *texts, timeout_s=20.0, **columns):
    inputs = RewardInputs(
        prompts=[[{"role": "user", "content": "2+2?"}]] * len(texts),
        completions=[[{"role": "assistant", "content": text}] for text in texts],
        completion_ids=[[1]] * len(texts),
        trajectory_ids=[f"0_{i}" for i in range(len(texts))],
        columns=columns,
    )
    return call_rewards({"judge": judge}, inputs, timeout_s=timeout_s).rewards["judge"].tolist()


def by_length(body):
    answer = body["messages"][-1]["content"].partition("<answer>")[2].partition("</answer>")[0].strip()
    return f"It is fine.\n{len(answer)}"


def test_completions_are_graded_and_equal_ones_asked_once(judges, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = judges((200, by_length))
    judge = JudgeModel(server.url, "m", options={"max_tokens": 5})
    assert rewards(judge, "four", "4", "four") == [0.4, 0.1, 0.4]
    assert len(server.bodies) == 2 and set(server.keys) == {("/v1/chat/completions", "Bearer secret")}
    body = server.bodies[0]
    assert body["model"] == "m" and body["max_tokens"] == 5 and body["temperature"] == 0.0
    assert "2+2?" in body["messages"][0]["content"]
    assert rewards(judge, "4") == [0.1] and len(server.bodies) == 2 and judge.tokens == 20


def test_the_prompt_has_columns_and_the_scale_is_read(judges):
    server = judges((200, "3"))
    judge = JudgeModel(server.url, "m", "{completion} or {answer}? {low:g}-{high:g} {{}}", system="S", scale=(1, 5))
    assert rewards(judge, "a", answer=["b"]) == [0.5]
    assert [m["content"] for m in server.bodies[0]["messages"]] == ["S", "a or b? 1-5 {}"]
    with pytest.raises(RewardError, match=r"can't be filled .*'none'.*it may name answer, "):
        rewards(JudgeModel(server.url, "m", "{completion} {none}"), "a", answer=["b"])


def test_a_reply_without_a_grade_gives_no_reward(judges, caplog):
    server = judges((200, lambda body: "11" if "eleven" in str(body) else "no number"))
    values = rewards(JudgeModel(server.url, "m"), "a", "eleven")
    assert [value != value for value in values] == [True, True] and len(server.bodies) == 2
    assert "2 of 2 replies have no grade" in caplog.text


def test_failures_are_repeated_and_then_raised(judges):
    server = judges((500, "busy"), (429, "slow down"), (200, "10"))
    assert rewards(JudgeModel(server.url, "m"), "a") == [1.0] and len(server.bodies) == 3
    with pytest.raises(RewardError, match=r"did not answer 2 times.*status 503: .*down"):
        rewards(JudgeModel(judges((503, "down")).url, "m", retries=1), "a")
    refusing = judges((400, "no such model"))
    with pytest.raises(RewardError, match=r"refused a request with status 400.*no such model"):
        rewards(JudgeModel(refusing.url, "m"), "a")
    assert len(refusing.bodies) == 1
    with pytest.raises(RewardError, match="did not answer 1 times"):
        rewards(JudgeModel("http://127.0.0.1:9/v1", "m", retries=0), "a")


def test_a_slow_judge_is_given_up(judges):
    with pytest.raises(RewardError, match=r"did not answer 1 times.*timed out"):
        rewards(JudgeModel(judges(1.5).url, "m", retries=0, timeout_s=0.2), "a")


@pytest.mark.parametrize(("bound", "unit"), [({"max_requests": 2}, "requests"), ({"max_tokens": 20}, "tokens")])
def test_the_budget_ends_the_requests(judges, bound, unit):
    server = judges((200, "5"))
    judge = JudgeModel(server.url, "m", max_concurrent=1, **bound)
    assert rewards(judge, "a", "b") == [0.5, 0.5]
    with pytest.raises(RewardError, match=rf"its budget of .* {unit} is spent"):
        rewards(judge, "c")
    assert rewards(judge, "a") == [0.5] and len(server.bodies) == 2  # from the cache


def test_the_cache_is_a_file_that_the_next_process_reads(judges, tmp_path):
    server = judges((200, "5"))
    assert rewards(JudgeModel(server.url, "m", cache=tmp_path / "judge.sqlite"), "a") == [0.5]
    assert rewards(JudgeModel(server.url, "m", cache=tmp_path / "judge.sqlite"), "a") == [0.5]
    assert len(server.bodies) == 1
    (tmp_path / "text").write_text("x" * 5000)
    with pytest.raises(ConfigError, match="can't be opened"):
        JudgeModel(server.url, "m", cache=tmp_path / "text")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"base_url": "file:///etc/passwd"}, "must begin with http"),
        ({"scale": (3, 3)}, "lowest grade"),
        ({"prompt": "grade it"}, "must contain {completion}"),
    ],
)
def test_wrong_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        JudgeModel(**{"base_url": "http://127.0.0.1:9", "model": "m", **given})
