"""Episodes of environments that are classes, played by hand and in learners of a tiny model, for tests."""

import functools
import time

import numpy as np
from chat_templates import TOOLS
from helpers import END, cluster, rows, tiny_model

from whet.config import DataConfig, GRPOConfig, Mode, PPOConfig
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import byte_tokenizer
from whet.envs import Conversation, EnvironmentClass, Script
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.step import Step
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode
from whet.rollout.external_calls import ExternalCall, ExternalCalls
from whet.types import TokenBatch

WORLD = """
import asyncio

class World:
    def reset(self, prompt, answer, **row):
        self.seen, self.answer = [], answer
        return f" [{answer}]"

    def count(self, by: int) -> int:
        '''Counts.

        Args:
            by: how far.
        '''
        self.seen.append(by)
        return sum(self.seen)

    async def step(self, message):
        await asyncio.sleep(0.001 * (len(message["content"]) % 3))
        self.seen.append(len(message["content"]))
        return None if sum(map(ord, message["content"])) % 5 == 1 else str(self.seen)

    async def get_reward(self):
        return sum(self.seen) / 10 + len(self.answer)
"""
PLAIN = WORLD.replace("async def", "def").replace("await asyncio.sleep", "__import__('time').sleep")


def encoder(kind=None, template=TOOLS):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tools = EnvironmentClass(kind).tools.schemas if kind else None
    return PromptEncoder(tokenizer, apply_chat_template=True, tools=tools)


def run_conversation(kind, said, *, row=None, encode=None, turns=9, ends="stop", slow_s=0.0, **options):
    """An episode in which the model says these texts: the episode, its completions, and the model's contexts."""
    encode = encode or encoder(kind if EnvironmentClass(kind).tool_names else None)
    script = Script(name=kind.__name__, environment=EnvironmentClass(kind))
    sizes = {"max_turns": turns, "max_tokens": 4000, "end_ids": [END], **options}
    run = functools.partial(Conversation(script, encode, **sizes).run_episode, sampling=Sampling(max_tokens=400))
    episode = Episode(encode({"prompt": "2+3=", **(row or {})}, 7), (0, 1, 2, 3), run)
    contexts, said, calls, running = [], iter(said), ExternalCalls(), run(episode)
    try:
        request = next(running)
        while True:
            if isinstance(request, ExternalCall):
                calls.start(0, request)
                (result,) = calls.collect()
                failed = result.error is not None
                request = running.throw(result.error) if failed else running.send(result.value)
                continue
            contexts.append(request.tokens.tolist())
            time.sleep(slow_s)
            ids = np.array([*next(said).encode(), *([END] if ends == "stop" else [])], np.int32)
            columns = {"logprobs": np.full(len(ids), -1.0), "versions": np.full(len(ids), 4)}
            request = running.send(Output(id=0, tokens=ids, **columns, finish_reason=ends))
    except StopIteration as end:
        return episode, end.value, contexts
    finally:
        calls.close()


def learner(path, kind=GRPOLearner, *, reward=None, algo=None, rollout=None, **training):
    make = GRPOConfig if kind is GRPOLearner else PPOConfig
    model = functools.partial(tiny_model, max_position_embeddings=2048)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS
    sizes = {"max_turns": 3, "max_prompt_length": 600, "max_episode_tokens": 700, "max_tokens_to_generate": 6}
    made = cluster(
        actor=model(),
        critic=model(1) if kind is PPOLearner else None,
        tokenizer=tokenizer,
        rollout={"env_path": path, **sizes, **(rollout or {})},
        **{"max_steps": 2, **training},
    )
    data = DataConfig(batch_size=2, apply_chat_template=True)
    generations = 3 if kind is GRPOLearner else 1
    return kind(made, make(**{"beta": 0.0, "num_generations": generations, **(algo or {})}), reward, data=data)


def batch_of(made, count=2):
    encode = made.encoder(Mode.TRAIN)
    prompts = [encode(row, i) for i, row in enumerate(rows(count, answer=["1", "22", "333"][:count]))]
    step = made.reward(made.sample(Step(index=5, prompts=prompts)))
    return step, TokenBatch.from_groups(step.groups)
