"""An agent of OpenAI's Agents SDK, as its users write it, is trained: its tool calls, and the answers of its tools."""

import numpy as np
import pytest
from agent_runs import batch_of, completions_of, learner
from chat_templates import TOOLS
from served import CALL, saying

agents = pytest.importorskip("agents", reason="the Agents SDK is not installed; pip install openai-agents")
from openai import AsyncOpenAI  # noqa: E402  (the SDK brings it)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def adder(base_url, api_key, row):
    """The SDK runs the loop: it calls the model, runs the tool, and calls the model again."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = agents.Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
        result = await agents.Runner.run(
            agent, row["prompt"], max_turns=4, run_config=agents.RunConfig(tracing_disabled=True)
        )
        return float(result.final_output == "five")


def test_the_sdk_s_loop_is_an_episode():
    said = lambda prompt: "five" if "tool_response" in prompt else CALL
    sizes = {"max_prompt_length": 100, "max_tokens_to_generate": 200}
    made = learner(adder, template=TOOLS, rollout=sizes, engine=saying(said))
    step, batch = batch_of(made)
    assert step.rewards.total.tolist() == [1.0] * 6 and batch.num_sequences == 6
    decode = made.cluster.tokenizer.decode
    for c in completions_of(step):
        assert [m["role"] for m in c.messages] == ["assistant", "tool", "assistant"] and c.info["turns"] == 2
        sampled, rest = decode(c.tokens[c.versions >= 0]), decode(c.tokens[c.versions < 0])
        assert sampled == f"{CALL}<|im_end|>five<|im_end|>" and "<tool_response>\n5" in rest
        assert "Use the tool." in decode(c.prefix) and '"name": "add"' in decode(c.prefix)
    assert np.isfinite(step.rewards.total).all()
    made.close()
