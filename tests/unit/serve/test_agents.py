"""Agents in a training run: an agent that knows a base URL and a key is an episode, and what it does wrong is told."""

import asyncio
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from agent_runs import ask, batch_of, completions_of, learner, post, refused, two_turns
from chat_templates import QWEN3
from helpers import one_by_one, rows, same, tiny_model, weights_of

from whet.config import Mode, RolloutConfig
from whet.envs.agent import load_agent
from whet.errors import ConfigError, DataError, RewardError
from whet.learners.episodes import make_agent_episodes
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.step import Step
from whet.rollout import driver
from whet.rollout.base import Output, Sampling
from whet.rollout.external_calls import CallTimeoutError
from whet.run.signals import Stopped
from whet.serve.agent_episodes import _events_record, _read_events
from whet.serve.agent_server import AgentCall, AgentEnd, Inbox
from whet.serve.api_errors import ApiError
from whet.serve.calls import ROUTES
from whet.types import Prompt

# ---- sequences and rewards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, QWEN3])
def test_the_trainer_computes_the_logprobs_that_the_sampler_had(template):
    made = learner(two_turns, template=template)
    step, batch = batch_of(made)
    forks = sum(c.info.get("forks", 0) > 0 for c in completions_of(step))
    assert len(step.rewards.total) == len(batch.group_of) == 6 and (forks > 0) == (template is not None)
    at = batch.mask
    assert torch.equal(at, batch.versions >= 0)
    want = batch.sampler_logprobs[at]
    torch.testing.assert_close(made.cluster.actor.logprobs(batch).logprobs[at], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one_by_one(made.cluster.actor.module, batch)[at], want, atol=1e-5, rtol=1e-5)
    for group in step.groups:
        prefixes = [c.prefix for c in group.completions]
        assert all(p is not None and bytes(i for i in p.tolist() if i < 256).find(b"Be short.") >= 0 for p in prefixes)
    made.close()


def test_the_reward_is_what_the_agent_returns_and_the_messages_are_those_after_its_prompt():
    step, _ = batch_of(learner(two_turns))
    said = [sum(len(m["content"]) for m in c.messages if m["role"] == "assistant") for c in completions_of(step)]
    assert step.rewards.total.tolist() == [float(n) for n in said] and dict(step.rewards.table).keys() == {"agent"}
    for c in completions_of(step):
        assert [m["role"] for m in c.messages] == ["assistant", "user", "assistant"]
        assert c.info["turns"] == 2 and c.info["prompt"][0]["content"] == "Be short."
        assert c.seconds["agent"] >= 0 and c.seconds["engine"] >= 0


def rewards_of_turns(base_url, api_key, row):
    """Two conversations of one call and of two, with the rewards 1, 2 and 4."""
    question = [{"role": "user", "content": row["prompt"]}]
    ask(base_url, api_key, [{"role": "user", "content": "first"}])
    for _ in range(2):
        question += [ask(base_url, api_key, question), {"role": "user", "content": "Sure?"}]
    return [1, 2.0, 4]


def test_rewards_of_turns_lie_at_their_last_tokens_and_add_up():
    step, _ = batch_of(learner(rewards_of_turns, algo={"advantage_estimator": "turn_rloo"}))
    assert step.rewards.table["agent"].tolist() == [7.0] * 6
    for first, second in zip(*[iter(completions_of(step))] * 2, strict=True):
        sampled = second.versions >= 0
        (between,) = np.flatnonzero(np.diff(sampled.astype(int)) < 0)
        expected = [np.zeros(len(first.tokens)), np.zeros(len(second.tokens))]
        expected[0][-1], expected[1][between], expected[1][-1] = 1, 2, 4
        assert [first.token_rewards.tolist(), second.token_rewards.tolist()] == [e.tolist() for e in expected]


@pytest.mark.parametrize("returned", [[1.0], [1.0, 2.0, None], [1.0, math.inf, 2.0]])
def test_a_list_of_rewards_has_a_number_for_each_turn(returned):
    def agent(base_url, api_key, row):
        rewards_of_turns(base_url, api_key, row)
        return returned

    with pytest.raises(RewardError, match=r"for each (call|turn)"):
        batch_of(learner(agent))


def test_an_agent_that_asks_as_the_data_does_has_the_group_s_prompt():
    def agent(base_url, api_key, row):
        return len(ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])["content"])

    step, batch = batch_of(learner(agent))
    assert all(c.prefix is None for c in completions_of(step)) and len(batch.prefix_ends) == 2


def test_rewards_of_functions_are_added():
    function = lambda completions, **_: [100.0] * len(completions)
    agent = lambda base_url, api_key, row: (two_turns(base_url, api_key, row), 1.0)[1]
    step, _ = batch_of(learner(agent, reward=function))
    assert step.rewards.total.tolist() == [101.0] * 6


def test_what_is_drawn_depends_neither_on_the_order_of_agents_nor_on_their_form():
    runs = []
    for delays in (lambda row: 0.0, lambda row: 0.03 * (row["i"] % 2)):

        async def agent(base_url, api_key, row, delays=delays):
            await asyncio.sleep(delays(row))
            return await asyncio.to_thread(two_turns, base_url, api_key, row)

        made = learner(agent)
        encode = made.encoder(Mode.TRAIN)
        prompts = [encode(row, i) for i, row in enumerate(rows(4, i=list(range(4))))]
        runs.append([c.tokens.tolist() for c in completions_of(made.sample(Step(index=1, prompts=prompts)))])
        made.close()
    assert runs[0] == runs[1]


def test_an_async_agent_that_blocks_delays_others_and_ends():
    async def agent(base_url, api_key, row):
        return two_turns(base_url, api_key, row)  # a blocking client in an async function

    step, _ = batch_of(learner(agent))
    assert np.isfinite(step.rewards.total).all()


def test_two_calls_at_once_are_two_sequences():
    async def agent(base_url, api_key, row):
        call = lambda text: asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": text}])
        return sum(len(m["content"]) for m in await asyncio.gather(call("a"), call("b")))

    step, batch = batch_of(learner(agent))
    assert batch.num_sequences == 12 and len(step.rewards.total) == 6


def test_streams_tokens_and_models_are_served_too():
    seen = []

    def agent(base_url, api_key, row):
        text = post(base_url, api_key, messages=[{"role": "user", "content": "a"}], stream=True)
        ids = list(b"count: ")
        more = {"return_token_ids": True, "max_tokens": 3}
        for _ in range(2):
            choice = post(base_url, api_key, "/completions", prompt=ids, **more)["choices"][0]
            ids = [*ids, *choice["token_ids"], *b" next "]
        request = urllib.request.Request(base_url + "/models", headers={"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request) as response:
            models = json.load(response)
        seen.append((text.count("data: "), models["data"][0]["id"]))
        return 1.0

    step, batch = batch_of(learner(agent), 1)
    assert batch.num_sequences == 6 and all(name == "policy" and count >= 3 for count, name in seen)
    (chat, tokens) = step.groups[0].completions[:2]
    assert (tokens.versions == -1).sum() == len(b" next ") and tokens.prefix.tolist() == list(b"count: ")
    assert chat.info["turns"] == 3


def test_a_call_reuses_what_the_engine_has_of_its_conversation():
    made = learner(two_turns)
    before = made.cluster.engine.stats()
    step, _ = batch_of(made)
    done = made.cluster.engine.stats().since(before)
    first = sum(len(c.prefix) for c in completions_of(step))
    assert done.prefilled < first + sum(len(c.tokens) for c in completions_of(step)) and done.reused >= first / 2
    made.close()


def test_agents_wait_beside_each_other():
    async def agent(base_url, api_key, row):
        await asyncio.sleep(0.3)
        return len((await asyncio.to_thread(ask, base_url, api_key, [{"role": "user", "content": "a"}]))["content"])

    made = learner(agent, algo={"num_generations": 20})
    batch_of(made, 1)
    started = time.monotonic()
    step, _ = batch_of(made)
    assert len(step.rewards.total) == 40 and time.monotonic() - started < 4  # one after the other: 12 s
    made.close()


def test_an_agent_that_is_slow_holds_up_none_of_many():
    waiting = threading.Semaphore(0)

    def agent(base_url, api_key, row):
        number = int(api_key.partition("-")[0])
        if number < 70:  # more than the calls that the driver runs at once
            assert waiting.acquire(timeout=20)
        ask(base_url, api_key, [{"role": "user", "content": "a"}])
        if number == 71:
            waiting.release(70)
        return 1.0

    made = learner(agent, algo={"num_generations": 72})
    step, _ = batch_of(made, 1)
    assert np.isfinite(step.rewards.total).all() and len(step.rewards.total) == 72
    made.close()


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GRPOLearner, PPOLearner])
def test_a_run_resumes_to_the_bit(kind, tmp_path):
    data = rows(8, answer=["1"] * 8)
    more = {"eval_every_n_steps": 1, "checkpointing_options": {"save_interval_steps": 1}}
    weights = []
    for name, steps in (("whole", (2,)), ("parts", (1, 2))):
        for last in steps:
            resume = {"resume": "latest"} if last != steps[0] else {}
            made = learner(two_turns, kind, max_steps=last, run_dir=str(tmp_path / name), **more, **resume)
            run = made.train(data, data[:2])
            made.close()
        weights.append(weights_of(made.cluster.actor.module))
    assert same(*weights) and not same(weights[0], weights_of(tiny_model(max_position_embeddings=512)))
    assert run.rows[-1]["turns/mean"] == 2 and "rewards/agent" in run.rows[-1]


AGENT = """
import asyncio, json, urllib.request

def call(base_url, api_key, messages):
    headers = {"Authorization": f"Bearer {api_key}"}
    body = json.dumps({"model": "gpt-5", "messages": messages, "temperature": 1.0}).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]

async def agent(base_url, api_key, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    messages += [await asyncio.to_thread(call, base_url, api_key, messages), {"role": "user", "content": "Sure?"}]
    last = await asyncio.to_thread(call, base_url, api_key, messages)
    return float(len(last["content"])) + (row["answer"] == "4")
"""


def test_the_command_line_trains_and_evaluates_an_agent(tmp_path, monkeypatch):
    from whet.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+2=", "answer": "4"}) for i in range(4)))
    tiny_model(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    words = ["model=model", "tokenizer=byte", "data=data.jsonl", "rollout.agent=agent.py:agent", "max_tokens=16"]
    more = ["algo.num_generations=2", "data.batch_size=2", "trainer.max_steps=2", "trainer.run_dir=run"]
    assert main(["grpo", *words, *more, "data.apply_chat_template=true", "actor.dtype=float32"]) == 0
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(logged) == 2 and all(row["rewards/agent"] >= 1 and row["turns/mean"] == 2 for row in logged)
    assert main(["eval", *words, "data.apply_chat_template=true", "dtype=float32", "out=out"]) == 0  # of any model
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["prompts"] == 4 and results["completions_without_reward"] == 0


def test_a_run_ends_with_its_servers():
    made = learner(two_turns)
    made.train(rows(4))
    (episodes,) = made._agents.values()
    made.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(episodes.server.url + "/health", timeout=2)


# ---- failures --------------------------------------------------------------------------------------------------------


def raises(base_url, api_key, row):
    two_turns(base_url, api_key, row)
    raise KeyError("no such tool")


async def hangs(base_url, api_key, row):
    await asyncio.to_thread(two_turns, base_url, api_key, row)
    await asyncio.sleep(60)


async def cancels_itself(base_url, api_key, row):
    raise asyncio.CancelledError


FAILURES = [
    (cancels_itself, "the agent cancels_itself raised CancelledError"),
    (raises, "the agent raises raised KeyError: 'no such tool'"),
    (hangs, "the agent hangs has not returned within 0.4 s"),
    (lambda base_url, api_key, row: time.sleep(5), "the agent lambda has not returned within 0.4 s"),
    (lambda base_url, api_key, row: "good", "the agent lambda returned 'good'; return its reward, a finite number"),
    (lambda base_url, api_key, row: 1.0, "the agent lambda returned without a call of the model"),
]


@pytest.mark.parametrize("every", [False, True])
def test_failed_episodes_are_counted_and_the_first_ones_told(every, caplog):
    numbers = itertools.count()

    def agent(base_url, api_key, row):
        ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])
        if every or next(numbers) < 11:
            raise OSError("the sandbox is gone")

    made = learner(agent, on_reward_error="none", algo={"num_generations": 12}, max_steps=1)
    (row,) = made.train(rows(2)).train_rows
    warnings = [r.getMessage() for r in caplog.records if "the sandbox is gone" in r.getMessage()]
    failed = row["turns/failed"]
    assert failed == made.failures.count == (24 if every else 11)
    assert len(warnings) == 4 and warnings[2].endswith("the next ones are only counted, in turns/failed")
    assert warnings[3].startswith("10 episodes have failed so far; row ")
    fields = made.new_task().progress_fields(row)
    assert fields["failed"] == str(int(failed)) and fields.get("truncated") == (None if every else "100%")
    told = "the agent or environment failed in each episode" if every else "the agent returned None in each episode"
    assert f"all rewards are None, since {told}" in caplog.text
    assert ("a function without `return` returns None" in caplog.text) is not every
    made.close()


def test_a_run_that_should_stop_gives_up_agents_that_hang(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(driver, "STOP_WAIT_S", 0.3)
    monkeypatch.setattr(driver, "STOP_POLL_S", 0.05)
    begun, hang_after, cancelled = [], [6], []

    async def agent(base_url, api_key, row):
        begun.append(row)
        number = len(begun)
        await asyncio.to_thread(two_turns, base_url, api_key, row)
        if number > hang_after[0]:
            if number == hang_after[0] + 6:
                os.kill(os.getpid(), signal.SIGINT)
            try:
                await asyncio.sleep(60)
            finally:
                cancelled.append(row)
        return 1.0

    folder = {"run_dir": str(tmp_path), "max_steps": 3}
    made = learner(agent, **folder)
    started = time.monotonic()
    with pytest.raises(Stopped, match=r"stopped after step 1; checkpoint: .*step-000001") as told:
        made.train(rows(8))
    assert time.monotonic() - started < 20 and told.value.checkpoint.is_dir()
    assert made.cluster.engine.stats().in_flight == 0
    assert "waiting for agent agent in 6 episodes; after 0.3 s of waiting in all" in caplog.text
    hang_after[0] = 100
    made.close()
    made = learner(agent, **folder, resume="latest")
    assert made.train(rows(8)).step == 3 and len(cancelled) == 6
    made.close()
    hang_after[0] = len(begun)
    made = learner(agent)
    with pytest.raises(Stopped, match="stopped before the end of the first step; nothing was trained"):
        made.train(rows(4))
    made.close()


@pytest.mark.parametrize(("agent", "words"), FAILURES)
def test_an_agent_that_fails_ends_the_run_or_its_own_episode(agent, words, caplog):
    limits = {"rollout": {"agent_timeout_s": 0.4 if "0.4 s" in words else 60.0}}  # others may take long under load
    made = learner(agent, **limits)
    with pytest.raises(RewardError) as told:
        batch_of(made, 1)
    assert words in str(told.value)
    assert made.cluster.engine.stats().in_flight == 0
    made.close()
    made = learner(agent, on_reward_error="none", **limits)
    step, _ = batch_of(made, 1)
    assert np.isnan(step.rewards.total).all() and words in caplog.text
    assert {c.finish_reason for c in completions_of(step)} == {"error"}
    scored = made.assign_advantages(made.score(made.batch(step))).batch
    assert (scored.advantages == 0).all()
    made.close()


def test_one_failing_agent_is_left_out_of_its_group_and_the_step_is_trained():
    def agent(base_url, api_key, row):
        if len(ask(base_url, api_key, [{"role": "user", "content": row["prompt"]}])["content"]) % 2:
            raise OSError("the sandbox is gone")
        return 1.0

    made = learner(agent, on_reward_error="none", max_steps=1)
    step, _ = batch_of(made, 4)
    failed = np.array([c.finish_reason == "error" for c in completions_of(step)])
    assert failed.any() and not failed.all() and np.isnan(step.rewards.total).tolist() == failed.tolist()
    assert made.train(rows(4)).step == 1
    made.close()


def test_wrong_keys_and_ended_episodes_are_refused_and_a_session_s_name_is_not():
    keys, told, first = [], [], threading.Lock()

    def agent(base_url, api_key, row):
        hi = [{"role": "user", "content": "a"}]
        ask(base_url, api_key, hi)
        if first.acquire(blocking=False):
            number, secret = api_key.split("-")
            told.append(refused(lambda: ask(base_url, "", hi)))
            told.append(refused(lambda: ask(base_url, f"{int(number) + 1}-{secret}", hi)))
            told.append(refused(lambda: ask(base_url, "999999-abc", hi)))
            ask(base_url.replace("/v1", "/sessions/a/v1"), api_key, hi)  # the key says which episode it is
        keys.append((base_url, api_key, hi))
        return 1.0

    made = learner(agent)
    batch_of(made, 1)
    assert [status for status, _ in told] == [401, 401, 401] and "API key" in told[0][1]
    status, message = refused(lambda: ask(*keys[0]))
    assert status == 410 and "this episode has ended" in message
    made.close()


def test_a_call_that_outlives_its_agent_is_refused():
    answers = []

    async def agent(base_url, api_key, row):
        call = lambda: refused(lambda: ask(base_url, api_key, [{"role": "user", "content": "late"}]))
        ask(base_url, api_key, [{"role": "user", "content": "a"}])
        threading.Timer(0.3, lambda: answers.append(call())).start()
        return 1.0

    made = learner(agent)
    batch_of(made, 1)
    deadline = time.monotonic() + 10
    while len(answers) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [status for status, _ in answers] == [410] * 3
    made.close()


@pytest.mark.parametrize(("added", "size"), [(60, "tokens in the prompt"), (10**6, "characters")])
def test_a_full_context_is_told_and_is_the_model_s_failure(added, size, caplog):
    told = []

    def agent(base_url, api_key, row):
        messages = [{"role": "user", "content": "a"}]
        while True:
            try:
                messages += [ask(base_url, api_key, messages), {"role": "user", "content": "x" * added}]
            except urllib.error.HTTPError as error:
                told.append(json.loads(error.read())["error"]["code"])
                raise

    made = learner(agent, rollout={"max_episode_tokens": 100})  # and 100 of the prompt
    step, _ = batch_of(made, 1)
    assert caplog.text.count("an agent's call has ") == 1
    assert f"{size}, and the limit with its completion is 200" in caplog.text
    assert set(told) == {"context_length_exceeded"} and np.isnan(step.rewards.total).all()
    for c in completions_of(step):
        assert c.finish_reason == "length" and len(c.prefix if c.prefix is not None else []) + len(c.tokens) <= 200
    made.close()


def test_settings_of_an_agent_have_no_effect_and_are_warned_of(caplog):
    told = []

    def agent(base_url, api_key, row):
        hi = [{"role": "user", "content": row["prompt"]}]
        dropped = {"tool_choice": "required", "presence_penalty": 0.5, "reasoning_effort": "low", "logit_bias": {}}
        ask(base_url, api_key, hi, model="gpt-5", temperature=0.0, seed=1, max_tokens=100, stop=["\n\n\n"], **dropped)
        told.append(refused(lambda: ask(base_url, api_key, hi, response_format={"type": "json_object"})))
        told.append(refused(lambda: ask(base_url, api_key, [])))
        return 1.0

    made = learner(agent)
    step, batch = batch_of(made)
    assert caplog.text.count("the agent asks for temperature=0.0") == 1 and "seed=1" in caplog.text
    assert all(caplog.text.count(x) == 1 for x in ("tool_choice='required'", "presence_penalty=0.5", "effort='low'"))
    assert max(len(c.tokens) for c in completions_of(step)) <= 6
    at = batch.mask
    want = batch.sampler_logprobs[at]
    torch.testing.assert_close(made.cluster.actor.logprobs(batch).logprobs[at], want, atol=1e-5, rtol=1e-5)
    assert {status for status, _ in told} == {400} and "rollout.constraint" in told[0][1]
    made.close()


def test_a_turn_whose_client_has_gone_is_not_trained():
    def agent(base_url, api_key, row):
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
        host, port = base_url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port))) as gone:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
            gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.6)  # the server looks every POLL_S whether its client is there
        ask(base_url, api_key, [{"role": "user", "content": "b"}])
        return 1.0

    made = learner(agent)
    engine = made.cluster.engine
    step_of, waited = engine.step, []

    def slow(*args, **kwargs):
        if not waited:
            waited.append(time.sleep(0.5))
        return step_of(*args, **kwargs)

    engine.step = slow
    step, batch = batch_of(made, 1)
    assert [c.info["turns"] for c in completions_of(step)] == [1] * 3 and batch.num_sequences == 3
    made.close()


def test_a_column_with_the_name_of_the_prompt_is_refused():
    made = learner(two_turns)
    made.data = dataclasses.replace(made.data, prompt_column="question")
    prompts = [made.encoder(Mode.TRAIN)({"question": "a", "prompt": "b"}, 3)]
    with pytest.raises(DataError, match="row 3 has a column 'prompt' besides its prompt"):
        made.sample(Step(index=1, prompts=prompts))
    made.close()


def test_a_sequence_longer_than_the_data_s_prompts_and_a_completion_is_trained():
    def agent(base_url, api_key, row):
        return len(ask(base_url, api_key, [{"role": "user", "content": "x" * 2500}])["content"])

    rollout = {"max_episode_tokens": 3000}
    made = learner(agent, rollout=rollout, actor=tiny_model(max_position_embeddings=4096), max_steps=1)
    assert made.train(rows(2)).step == 1
    made.close()


# ---- configuration ---------------------------------------------------------------------------------------------------


def test_settings_that_contradict_an_agent_are_refused():
    with pytest.raises(ConfigError, match=r"agent and env_path: an agent decides itself"):
        RolloutConfig(agent="a.py:f", env_path="e.py")
    with pytest.raises(ConfigError, match=r"agent and max_turns=2"):
        RolloutConfig(agent="a.py:f", max_turns=2)
    with pytest.raises(ConfigError, match=r"agent_timeout_s must be positive, got 0\.0"):
        RolloutConfig(agent_timeout_s=0)
    with pytest.raises(ConfigError, match="called as agent"):
        load_agent(lambda base_url: 0.0)
    with pytest.raises(ConfigError, match="agent 5 is not a function"):
        load_agent(5)

    async def yields(base_url, api_key, row):
        yield 1.0

    with pytest.raises(ConfigError, match=r"agent yields is a generator, since it yields; .*: write return"):
        load_agent(yields)
    with pytest.raises(ConfigError, match="no file no_such_agent"):
        learner("no_such_agent.py:agent")
    with pytest.raises(ConfigError, match="compares with the reward of a greedy completion"):
        learner(two_turns, algo={"advantage_estimator": "remax"})

    def agent(completions, **_):
        return [0.0] * len(completions)

    with pytest.raises(ConfigError, match="a reward function is named agent"):
        learner(two_turns, reward=agent)


# ---- events, one by one ----------------------------------------------------------------------------------------------


def called(text="a"):
    body_class, call_class = ROUTES["/v1/chat/completions"]
    return AgentCall(call_class, body_class.model_validate({"messages": [{"role": "user", "content": text}]}))


@pytest.fixture
def waiting():
    """An episode whose agent waits, at its first event; and when the agent has been cancelled."""
    begun, ended = threading.Event(), threading.Event()

    async def agent(base_url, api_key, row):
        row["list"].append(1)
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    made = learner(agent)
    episodes = make_agent_episodes(made.cluster, Mode.TRAIN, made.encoder(Mode.TRAIN), made.failures)
    source, sampling = [{"role": "user", "content": "a"}], Sampling(max_tokens=4)
    prompt = Prompt(tokens=np.array([5, 6], np.int32), source=source, row=0, columns={"list": []})
    episode = driver.single_turn(prompt, sampling, rng_key=(0, 0, 0, 0))
    run = episodes.run_episode(episode, sampling)
    assert next(run).phase == "agent" and begun.wait(10)
    yield run, episode, ended
    run.close()
    episodes.close()
    made.close()


def test_a_call_that_comes_with_the_end_of_its_agent_is_refused_and_the_agent_is_ended_with_its_episode(waiting):
    (run, episode, ended), first, late = waiting, called(), called("late")
    assert len(run.send([first])) == 1
    tokens, zeros = np.array([70, 71], np.int32), np.zeros(2)
    output = Output(id=0, tokens=tokens, logprobs=zeros, versions=zeros.astype(int), finish_reason="length")
    assert run.send([output]).phase == "agent" and isinstance(first.answer, list)
    with pytest.raises(StopIteration) as end:
        run.send([late, AgentEnd(value=1.0)])
    assert [c.info["turns"] for c in end.value.value] == [1] and late.answer.status == 410
    assert ended.wait(10) and episode.prompt.columns["list"] == []  # it has a copy
    calls, end = _read_events(json.loads(json.dumps(_events_record([first, late], AgentEnd(value=1.0)))))
    assert [call.is_abandoned for call in calls] == [False, True] and end.value == 1.0


def test_an_agent_that_is_late_after_a_full_context_has_failed_and_the_model_has_not(waiting):
    run, *_ = waiting
    assert run.send([called("x" * 1000)]).phase == "agent"
    with pytest.raises(RewardError, match="give its calls limits of their own"):
        run.send([AgentEnd(error=CallTimeoutError("late"))])


def test_an_inbox_that_is_closed_refuses_what_waits_and_what_comes():
    inbox, waits = Inbox("k"), called()
    inbox.put(waits)
    inbox.close()
    assert waits.answer.status == 410
    with pytest.raises(ApiError, match="has ended"):
        inbox.put(called())
