"""Tools, environments and rollout_func: what TRL's own tests of agents check, on a tiny model with bytes."""

import asyncio
import copy
import functools
import math
import random
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from chat_templates import TOOLS
from helpers import END, PAD, length_reward, rows, same, tiny_model, weights_of
from transformers import TrainerCallback

from whet.data.tokenizer import byte_tokenizer
from whet.envs.tool_calls import ToolTemplate
from whet.envs.tools import ToolLimits, Tools
from whet.errors import ConfigError, DataError
from whet.trl import GRPOConfig, GRPOTrainer

SMALL = {"per_device_train_batch_size": 3, "num_generations": 3, "max_completion_length": 300, "learning_rate": 1e-2,
         "logging_steps": 1, "bf16": False, "disable_tqdm": True, "save_strategy": "no", "max_steps": 1,
         "per_device_eval_batch_size": 3, "gradient_checkpointing": False, "shuffle_dataset": False}  # fmt: skip
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


def tokenizer():
    made = byte_tokenizer()
    made.chat_template = TOOLS
    return made


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


async def later(text: str) -> str:
    """Says a text later.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0)
    if text == "no":
        raise KeyError(text)
    return text.upper()


def chats(count, **columns):
    return [{"prompt": [{"role": "user", "content": f"{i}?"}], **{n: c[i] for n, c in columns.items()}}
            for i in range(count)]  # fmt: skip


def saying(*turns):
    """A `generate` that says these: a list of texts for each call, one for each row that waits.

    A last turn may be a function of a row's text: which of several rows waits first depends on their tools.
    """
    left = list(turns)

    def generate(input_ids, **_):
        texts = left[0] if callable(left[0]) else left.pop(0)
        if callable(texts):
            texts = [texts(tokenizer().decode(row)) for row in input_ids]
        assert len(texts) == len(input_ids)
        made = [[*text.encode(), END] for text in texts]
        width = max(map(len, made))
        return torch.cat([input_ids, torch.tensor([m + [PAD] * (width - len(m)) for m in made])], 1)

    return generate


def trainer(tmp_path, reward=None, *, data=None, say=None, **kwargs):
    own = {n: kwargs.pop(n) for n in list(kwargs) if n in ("tools", "environment_factory", "rollout_func",
           "eval_dataset", "processing_class")}  # fmt: skip
    made = GRPOTrainer(
        tiny_model(max_position_embeddings=1024),
        reward,
        GRPOConfig(str(tmp_path), **{**SMALL, **kwargs}),
        chats(2) if data is None else data,
        **{"processing_class": tokenizer(), **own},
    )
    if say is not None:
        made.model.generate = saying(*say)
    return made


class Seen:
    """A reward function that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids, **columns):
        self.calls.append((prompts, completions, completion_ids, columns))
        return [float(len(ids) % 7 + i) for i, ids in enumerate(completion_ids)]


def test_tools_are_told_called_and_answered_and_only_the_model_s_tokens_are_trained(tmp_path):
    seen = Seen()
    first = [
        CALL % ("multiply", '{"a": 3, "b": 4}') + CALL % ("later", '{"text": "no"}'),
        "plain",
        CALL % ("none", "{}"),
    ]
    answer = lambda text: "12" if "<tool_response>\n12\n" in text else "so"
    made = trainer(tmp_path, seen, tools=[multiply, later], say=[first, answer])
    batches = []
    score = made.learner.score
    made.learner.score = lambda step: batches.append(step.batch) or score(step)
    made.train()
    prompts, completions, ids, _ = seen.calls[0]
    assert prompts[0] == [{"role": "user", "content": "0?"}]
    assert (
        "multiply" in made.learner.encoder("train")({"prompt": prompts[0]}).tokens.astype(np.uint8).tobytes().decode()
    )
    roles = [[m["role"] for m in c] for c in completions]
    assert roles == [["assistant", "tool", "tool", "assistant"], ["assistant"], ["assistant", "tool", "assistant"]]
    assert completions[0][0]["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 3, "b": 4}}
    assert completions[0][1] == {"role": "tool", "name": "multiply", "content": "12"}
    assert completions[0][2]["content"] == "{'error': \"'no'\"}"
    assert "Tool none not found" in completions[2][1]["content"]
    responses = (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n"
    )
    text = tokenizer().decode(ids[0])
    assert text.startswith(first[0] + "<|im_end|>" + responses)
    assert text.endswith("<|im_start|>assistant\n12<|im_end|>")
    batch = batches[0]
    said = [len(first[0].encode()) + 1 + 3, 6, len(first[2].encode()) + 1 + 3]
    assert [int(batch.mask[batch.sequence == i].sum()) for i in range(3)] == said
    row = made.state.log_history[0]
    assert row["tools/call_frequency"] == pytest.approx(3 / 3)
    assert row["tools/failure_frequency"] == pytest.approx(2 / 3)
    assert row["completions/mean_length"] == pytest.approx(sum(said) / 3)
    assert math.isfinite(row["loss"])


class Slow:
    def reset(self, **row):
        return None

    async def wait(self) -> str:
        """Waits for a long time."""
        await asyncio.sleep(60)


def test_tools_with_limits_of_their_own_and_their_environment_s(tmp_path):
    limited = Tools([multiply], limits=ToolLimits(timeout_s=0.1))
    calls = [CALL % ("wait", "{}"), CALL % ("multiply", '{"a": 3, "b": 4}'), "a"]
    made = trainer(tmp_path, seen := Seen(), tools=limited, environment_factory=Slow, say=[calls, lambda text: "so"])
    assert sorted(f.__name__ for f in made.tools) == ["multiply", "wait"]
    made.train()
    answers = [[m["content"] for m in c if m["role"] == "tool"] for c in seen.calls[0][1]]
    assert answers == [["{'error': 'no answer within 0.1 s'}"], ["12"], []]


def test_a_template_without_tools_is_told_in_trl_s_words(tmp_path):
    with pytest.raises(ConfigError, match=r"does not support tool calling.*or set processing_class\.chat_template"):
        trainer(tmp_path, length_reward, tools=[multiply], processing_class=byte_tokenizer())


def test_rounds_end_at_their_limit_and_an_answer_without_room_is_taken_back(tmp_path):
    seen = Seen()
    call = CALL % ("multiply", '{"a": 1, "b": 1}')
    made = trainer(tmp_path, seen, tools=[multiply], max_tool_calling_iterations=1, say=[[call] * 3, [call, "a", call]])
    made.train()
    assert [len(c) for c in seen.calls[0][1]] == [3, 3, 3]
    assert made.state.log_history[0]["tools/call_frequency"] == 1.0
    short = trainer(tmp_path, seen, tools=[multiply], max_completion_length=len(call) + 40, say=[[call, "a", "b"]])
    short.train()
    assert [[m["role"] for m in c] for c in seen.calls[1][1]] == [["assistant"]] * 3


def test_the_engine_runs_turns_with_its_own_logprobs(tmp_path, monkeypatch):
    seen = Seen()
    made = trainer(tmp_path, seen, tools=[multiply], max_completion_length=160, num_iterations=2, max_steps=2)
    template = made.agents.episodes.template
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
    first = lambda context: not context.tobytes().count(np.array(list(b"tool_response"), np.int32).tobytes())
    monkeypatch.setattr(template, "parse", lambda tokens, context, tools: {
        "role": "assistant", "content": "", **({"tool_calls": [call]} if first(context) else {})})  # fmt: skip
    episodes = made.agents.episodes
    episodes.max_tokens, run = 160, episodes.run_episode
    short = lambda episode, sampling, **start: run(episode, replace(sampling, max_tokens=20), **start)
    monkeypatch.setattr(episodes, "run_episode", short)
    made.train()
    assert all([m["role"] for m in c] == ["assistant", "tool", "assistant"] for c in seen.calls[0][1])
    row = made.state.log_history[0]
    assert row["tools/call_frequency"] == 1.0
    assert row["completions/max_length"] <= 40


class Counter:
    """An environment: counts up."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.count = None

    def reset(self, prompt, start=0, **row):
        self.count = start
        return f" from {start}"

    def increase(self, by: int) -> int:
        """Counts.

        Args:
            by: how far.
        """
        self.count += by
        return self.count

    def get_reward(self):
        return float(self.count)


class Silent:
    """An environment without a reward of its own."""

    def reset(self, **row):
        self.row = row

    async def ask(self) -> str:
        """Asks."""
        return "yes"


class Judged(Silent):
    """One whose reward is waited for."""

    async def get_reward(self):
        return None if self.row["level"] else 3.0


def test_an_environment_for_each_rollout_is_reset_and_gives_the_reward(tmp_path):
    seen = Seen()
    Counter.made = 0
    data = chats(2, start=[5, 7])
    say = [[CALL % ("increase", f'{{"by": {i}}}') for i in range(3)], ["ok"] * 3, ["a"] * 3]
    made = trainer(tmp_path, seen, data=data, environment_factory=Counter, reward_weights=[0.5], max_steps=2, say=say)
    made.train()
    prompts, completions, _, columns = seen.calls[0]
    assert prompts[0] == [{"role": "user", "content": "0? from 5"}]
    assert [c[1]["content"] for c in completions] == ["5", "6", "7"]
    assert [e.count for e in columns["environments"]] == [7, 7, 7]  # reset again for the second row
    assert Counter.made == 3
    assert (made.environments, made.reward_weights.tolist()) == (columns["environments"], [0.5, 1.0])
    assert "increase" in [tool.__name__ for tool in made.tools]
    row = made.state.log_history[0]
    assert row["rewards/Counter/mean"] == 6.0
    assert row["reward"] == pytest.approx(6.0 + 0.5 * row["rewards/Seen/mean"])
    alone = trainer(tmp_path, None, data=data, environment_factory=Counter, say=[["a"] * 3])
    alone.train()
    assert alone.state.log_history[0]["reward"] == 5.0


def test_rows_choose_among_several_environments(tmp_path):
    seen = Seen()
    data = [{"environment": "silent", "level": 3}, {"environment": "count", "start": 1}]
    say = [[CALL % ("ask", "{}"), "b", CALL % ("increase", '{"by": 1}')], ["yes", "no"], ["c"] * 3]
    made = trainer(tmp_path, seen, data=data, max_steps=2, say=say,
                   environment_factory={"count": Counter, "silent": Judged})  # fmt: skip
    made.train()
    assert seen.calls[0][1][0][1]["content"] == "yes"
    assert "Tool increase not found" in seen.calls[0][1][2][1]["content"]  # of the other environment
    assert seen.calls[0][3]["environments"][0].row == {"prompt": [{"role": "user", "content": ""}], "level": 3}
    assert seen.calls[1][0][0] == [{"role": "user", "content": " from 1"}]
    rewards = [row["rewards/Counter/mean"] for row in made.state.log_history if "loss" in row]
    assert rewards == [None, 1.0]
    judged = trainer(tmp_path, None, data=chats(1, level=[0]), environment_factory=Judged, say=[["a"] * 3])
    judged.train()
    assert judged.state.log_history[0]["rewards/Judged/mean"] == 3.0
    with pytest.raises(DataError, match="unknown environment 'other'"):
        trainer(tmp_path, seen, data=[{"environment": "other"}], environment_factory={"count": Counter}).train()


class StopAfter(TrainerCallback):
    """Ends a run after a step, as an interruption does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


class Dice:
    """An environment that never repeats itself."""

    draw, sum = random.SystemRandom(), 0
    asked: ClassVar[list[str]] = []

    def reset(self, **row):
        Dice.asked.append("reset")
        self.sum = 0
        return f" [{self.draw.randrange(1000)}]"

    def roll(self, sides: int) -> int:
        """Rolls.

        Args:
            sides: of the die.
        """
        Dice.asked.append("roll")  # atomic: tools run in threads
        result = self.draw.randrange(sides)
        self.sum += result
        return result

    def get_reward(self):
        return self.sum / 1000 + self.draw.random()


def answered(completions, **columns):
    """A reward of the tools' answers."""
    return [float(sum(map(ord, str(c))) % 7) for c in completions]


def doubled(environments, **columns):
    """Another reward that reads them."""
    return [2 * e.sum for e in environments]


@pytest.mark.parametrize("has_environment", [False, True])
def test_a_recorded_run_is_resumed_and_repeated_to_the_bit_without_its_tools(has_environment, tmp_path):
    def train(name, *stops, last="so", answers="answers"):
        own = {"environment_factory": Dice} if has_environment else {"tools": [Dice().roll]}
        own |= {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "answers_dir": str(tmp_path / answers)}
        Dice.asked.clear()
        for stop in (*stops, 3):
            folder = tmp_path / name
            reward = [answered, doubled] if has_environment else answered
            say = lambda text: last if "<tool_response>" in text else CALL % ("roll", '{"sides": 100000}')
            made = trainer(folder, reward, data=chats(3), say=[say], **own)
            if stop < 3:
                made.add_callback(StopAfter(stop))
            made.train(resume_from_checkpoint=(folder / "checkpoint-1").exists())
        return weights_of(made.model), [row["tools/call_frequency"] for row in made.state.log_history[:-1]]

    whole, called = train("whole")
    assert called == [1.0] * 3 and len(Dice.asked) == (18 if has_environment else 9)
    assert not same(whole, train("other", answers="elsewhere")[0])
    assert (again := train("again"))[1] == called and same(whole, again[0]) and not Dice.asked
    assert same(whole, train("parts", 1)[0])
    assert not same(whole, train("another", last="more")[0]) and len(Dice.asked) == (18 if has_environment else 9)


def test_an_environment_may_bring_the_prompts(tmp_path):
    class Riddle(Silent):
        number = 0

        def reset(self, **row):
            type(self).number += 1
            return f"riddle {self.number}"

    seen = Seen()
    made = GRPOTrainer(tiny_model(max_position_embeddings=1024), seen, GRPOConfig(str(tmp_path), **SMALL),
                       processing_class=tokenizer(), environment_factory=Riddle)  # fmt: skip
    made.model.generate = saying(["a", "b", "c"])
    made.train()
    assert [p[0]["content"] for p in seen.calls[0][0]] == ["riddle 1", "riddle 2", "riddle 3"]
    assert [tool.__name__ for tool in made.tools] == ["ask"]
    with pytest.raises(ConfigError, match="set max_steps"):
        GRPOTrainer(tiny_model(), seen, GRPOConfig(str(tmp_path), **{**SMALL, "max_steps": -1}),
                    processing_class=tokenizer(), environment_factory=Riddle)  # fmt: skip


# ---- rollout_func --------------------------------------------------------------------------------------------------


def rolled(prompts, trainer, **changes):
    asked = [list(p.encode()) for p in prompts]
    return {
        "prompt_ids": asked,
        "completion_ids": [[65, 66 + i, END] for i in range(len(prompts))],
        "logprobs": [[-1.0, -1.0, -1.0]] * len(prompts),
        "env_mask": [[1, 0, 1]] * len(prompts),
        "score": [float(i) for i in range(len(prompts))],
        "tag": "x",
        **changes,
    }


def test_rollout_func_makes_the_completions_and_its_columns_reach_the_rewards(tmp_path):
    given, masks = [], []

    def by_score(completions, score, tag, **rest):
        given.append((completions, score, tag, rest["answer"]))
        return score

    def fn(prompts, front):
        assert isinstance(front, GRPOTrainer)
        return rolled(prompts, front)

    made = trainer(tmp_path, by_score, data=rows(2, answer=[1, 2]), rollout_func=fn)
    score = made.learner.score
    made.learner.score = lambda step: masks.append(step.batch.mask.tolist()) or score(step)
    made.train()
    assert given[0] == (["AB", "AC", "AD"], [0.0, 1.0, 2.0], ["x"] * 3, [1, 1, 1])
    assert masks[0] == [True, False, True] * 3
    assert made.state.log_history[0]["completions/mean_length"] == 2.0
    assert not [name for name in made.state.log_history[0] if name.startswith("sampling/")]  # as in TRL without vLLM


def test_the_off_policy_mask_goes_by_the_logprobs_of_rollout_func(tmp_path):
    sampled = [[-1.0, None, -1.0], [-9.0, -9.0, -9.0], [-9.0, -9.0, -9.0]]  # the first is far above the policy's
    fn = functools.partial(rolled, logprobs=sampled, env_mask=[[1, 0, 1]] * 3)
    made = trainer(tmp_path, lambda score, **_: score, data=rows(1), rollout_func=fn, max_steps=1,
                   off_policy_mask_threshold=0.5, max_grad_norm=0.0)  # fmt: skip
    model = copy.deepcopy(made.model)
    answers = rolled(["x"] * 3, None)["completion_ids"]
    prompt = list(rows(1)[0]["prompt"].encode())
    total, gaps = 0.0, []
    # the worst is masked, and the middle's advantage is 0
    for answer, advantage, found in zip(answers, (0.0, 0.0, 1.0), sampled, strict=True):
        logprobs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs[torch.arange(3), torch.tensor(answer)]
        assert -8.5 < float(chosen.detach().min()) < float(chosen.detach().max()) < -1.5  # between what is sampled
        gaps.append(sum(abs(float(chosen[i].detach()) - found[i]) for i in (0, 2)) / 2)
        total = total - advantage / (1 + 1e-4) * (chosen[0] + chosen[2])
    (total / 6).backward()  # over all 6 tokens of the model
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    model.zero_grad()
    made.train()
    row = made.state.log_history[0]
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert row["sampling/sampling_logp_difference/mean"] == pytest.approx((gaps[0] + gaps[2]) / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, r"must return keys \['logprobs'\]"),
        ({"completion_ids": [[65, END]]}, "returned 1 completion_ids for 3 prompts"),
        ({"env_mask": [[1, 1]] * 3}, "completion 0: 3 completion_ids, 3 logprobs, 2 values of env_mask"),
    ],
)
def test_what_rollout_func_returns_is_checked(changes, message, tmp_path):
    def fn(prompts, front):
        found = rolled(prompts, front, **(changes or {}))
        return found if changes else {n: v for n, v in found.items() if n != "logprobs"}

    with pytest.raises(DataError, match=message):
        trainer(tmp_path, length_reward, data=rows(2), rollout_func=fn).train()


# ---- what is refused -----------------------------------------------------------------------------------------------


def nothing(a):
    return a


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [nothing]}, "needs type hints and a docstring"),
        ({"tools": [multiply, multiply]}, "two tools are named 'multiply'"),
        ({"tools": [multiply], "processing_class": byte_tokenizer()}, "does not support tool calling"),
        ({"tools": [multiply], "rollout_func": rolled}, "give one"),
        ({"environment_factory": dict}, "has no method reset"),
        ({"environment_factory": Silent, "reward": None}, "defines a `get_reward` method"),
    ],
    ids=lambda given: ",".join(given) if isinstance(given, dict) else "",
)
def test_what_can_t_be_is_refused(given, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, **{"reward": length_reward, **given})


def test_a_template_that_writes_calls_otherwise_needs_a_response_template():
    other = tokenizer()
    other.chat_template = TOOLS.replace('{"name": "', "call ").replace('", "arguments": ', " with ")
    with pytest.raises(ConfigError, match=r"set tokenizer\.response_template"):
        ToolTemplate(other, {}, [END])
    other.response_template = ToolTemplate(tokenizer(), {}, [END]).response_template
    assert ToolTemplate(other, {}, [END]).response_template["fields"]["tool_calls"]["open"] == "<tool_call>"


@pytest.mark.parametrize("last", ["", "<think>\n\n</think>\n\n"], ids=["appends", "writes its last turn otherwise"])
def test_what_follows_a_turn_is_what_the_template_puts_after_its_end(last):
    made = tokenizer()
    made.chat_template = TOOLS.replace(
        "<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}\n{% if loop.last %}" + last + "{% endif %}"
    )
    template = ToolTemplate(made, {}, [END])
    answer = template.encode_answer([{"role": "tool", "name": "f", "content": "8"}])
    expected = "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert made.decode(answer) == expected
