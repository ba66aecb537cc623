"""An agent that uses the official `openai` client, unmodified, in a training run."""

import numpy as np
import pytest
from agent_runs import batch_of, completions_of, learner
from chat_templates import TOOLS
from served import ADD, CALL

openai = pytest.importorskip("openai", reason="the openai client is not installed; pip install openai")


async def agent(base_url, api_key, row):
    """Two turns and a stream."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": row["prompt"]}]
        first = await client.chat.completions.create(model="gpt-5", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
        text = ""
        async for chunk in await client.chat.completions.create(model="gpt-5", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.with_options(api_key="wrong").chat.completions.create(model="gpt-5", messages=messages)
        return float(len(text))


def test_the_client_trains_as_it_is():
    made = learner(agent)
    step, _ = batch_of(made)
    assert np.isfinite(step.rewards.total).all()
    assert all(c.info == {"status": "finished", "turns": 2} and c.prefix is None for c in completions_of(step))
    made.close()


def test_tools_of_the_client():
    told = []

    def calls(base_url, api_key, row):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        history = [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": CALL},
            {"role": "user", "content": "again"},
        ]
        message = client.chat.completions.create(model="m", messages=history, tools=[ADD]).choices[0].message
        told.append(message.role)
        return 0.0

    made = learner(calls, template=TOOLS, rollout={"max_prompt_length": 400})
    batch_of(made, 1)
    assert told == ["assistant"] * 3
    made.close()
