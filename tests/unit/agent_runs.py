"""Learners of a tiny model whose episodes an agent plays, and the calls of agents, for tests."""

import functools
import json
import urllib.error
import urllib.request

import pytest
from helpers import cluster, rows, tiny_model

from whet.config import DataConfig, GRPOConfig, Mode, PPOConfig
from whet.data.tokenizer import byte_tokenizer
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.step import Step
from whet.types import TokenBatch


def post(base_url, api_key, path="/chat/completions", **body):
    """The answer to a call; HTTPError where it is refused."""
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode()
    return json.loads(text) if response.headers.get_content_type() == "application/json" else text


def ask(base_url, api_key, messages, **body):
    """The model's message."""
    return post(base_url, api_key, messages=messages, **body)["choices"][0]["message"]


def refused(call):
    """(status, message) of a call that must be refused."""
    with pytest.raises(urllib.error.HTTPError) as told:
        call()
    error = json.loads(told.value.read())["error"]
    return told.value.code, error["message"]


def two_turns(base_url, api_key, row):
    """Asks twice in one conversation, under a system prompt of its own. The reward is the number of characters."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["prompt"]}]
    for question in ("Sure?", "Really?"):
        messages += [ask(base_url, api_key, messages), {"role": "user", "content": question}]
    return sum(len(m["content"]) for m in messages if m["role"] == "assistant")


def learner(agent, kind=GRPOLearner, *, reward=None, template=None, algo=None, rollout=None, **training):
    make = GRPOConfig if kind is GRPOLearner else PPOConfig
    model = functools.partial(tiny_model, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    sizes = {"max_prompt_length": 100, "max_tokens_to_generate": 6, "max_episode_tokens": 400}
    made = cluster(
        actor=training.pop("actor", None) or model(),
        critic=model(1) if kind is PPOLearner else None,
        tokenizer=tokenizer,
        rollout={"agent": agent, **sizes, **(rollout or {})},
        **{"max_steps": 2, **training},
    )
    data = DataConfig(batch_size=2, apply_chat_template=True)
    generations = 3 if kind is GRPOLearner else 1
    return kind(made, make(**{"beta": 0.0, "num_generations": generations, **(algo or {})}), reward, data=data)


def batch_of(made, count=2):
    """A rewarded step, and its batch."""
    encode = made.encoder(Mode.TRAIN)
    prompts = [encode(row, i) for i, row in enumerate(rows(count, answer=["1"] * count))]
    step = made.reward(made.sample(Step(index=5, prompts=prompts)))
    return step, TokenBatch.from_groups(step.groups)


def completions_of(step):
    return [c for group in step.groups for c in group.completions]
