"""Environments that are classes: an instance for each episode, tools, steps, rewards, and what is refused."""

import asyncio
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chat_templates import QWEN3, TOOLS
from environment_runs import PLAIN, WORLD, batch_of, encoder, learner, run_conversation
from helpers import END, one_by_one, rows, same, tiny_model, weights_of

from whet.config import Mode, RolloutConfig
from whet.config.evaluate import check_eval, load_eval
from whet.config.run import RunConfig
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import byte_tokenizer
from whet.envs import load_script
from whet.envs.adapters.rl2 import step_environment
from whet.envs.environment import ENVIRONMENT_REWARD, EnvironmentClass
from whet.envs.failures import EpisodeFailures
from whet.envs.tool_calls import ToolTemplate
from whet.errors import ConfigError, DataError, RewardError
from whet.learners.episodes import load_environments
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'


class Account:
    """Keeps a balance; the episode's reward is the last one that it has been told of."""

    def __init__(self):
        self.log = []

    def reset(self, prompt, start=0, **row):
        self.balance = start
        self.log.append(("reset", prompt, row))

    def pay(self, amount: int) -> int:
        """Pays in.

        Args:
            amount: how much.
        """
        self.balance += amount
        return self.balance

    async def check(self) -> str:
        """Says the balance."""
        await asyncio.sleep(0)
        return f"you have {self.balance}"

    async def step(self, message):
        await asyncio.sleep(0)
        self.log.append(("step", message["content"]))
        return None if message["content"] == "done" else "go on"

    def get_reward(self):
        return self.balance


def decode(tokens):
    return byte_tokenizer().decode([int(i) for i in tokens])


# ---- an episode ------------------------------------------------------------------------------------------------------


def test_tools_steps_and_the_reward_are_those_of_one_instance():
    said = [CALL % ("pay", '{"amount": 5}') + CALL % ("check", "{}"), "hm", CALL % ("pay", '{"amount": 2}'), "done"]
    made = []

    class Seen(Account):
        def __init__(self):
            super().__init__()
            made.append(self)

    episode, (c,), contexts = run_conversation(Seen, said, row={"start": 10, "level": "hard"})
    (instance,) = made
    assert instance.log == [("reset", "2+3=", {"level": "hard"}), ("step", "hm"), ("step", "done")]
    assert [m["content"] for m in c.messages if m["role"] == "tool"] == ["15", "you have 15", "17"]
    assert c.messages[3] == {"role": "assistant", "content": "hm"} and c.messages[4]["content"] == "go on"
    assert episode.rewards == {ENVIRONMENT_REWARD: 17.0} and len(contexts) == 4
    assert c.info == {"status": "finished", "turns": 4, "tool_calls": 3, "tool_errors": 0} and c.finish_reason == "stop"
    text = decode([*contexts[0], *c.tokens.tolist()])
    user, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>"
    answers = f"{user}<tool_response>\n15\n</tool_response>{end}user\n<tool_response>\nyou have 15\n</tool_response>"
    assert text.partition(user)[2] == (
        f"2+3={end}assistant\n{said[0]}<|im_end|>\n{answers}{end}assistant\nhm{end}user\ngo on{end}assistant\n"
        f"{said[2]}{end}user\n<tool_response>\n17\n</tool_response>{end}assistant\ndone<|im_end|>"
    )
    sampled = bytes(i for i, v in zip(c.tokens.tolist(), c.versions.tolist()) if v == 4 and i < 256)
    assert sampled == "".join(said).encode()


def double(x: int) -> int:
    """Doubles.

    Args:
        x: a number.
    """
    return 2 * x


def test_a_class_may_have_tools_that_its_episodes_share():
    class WithMore(Account):
        tools = (double,)

    said = [CALL % ("double", '{"x": 4}') + CALL % ("pay", '{"amount": 5}'), "done"]
    episode, (c,), contexts = run_conversation(WithMore, said)
    assert [m["content"] for m in c.messages if m["role"] == "tool"] == ["8", "5"]
    assert episode.rewards == {ENVIRONMENT_REWARD: 5.0} and "Doubles." in decode(contexts[0])
    with pytest.raises(ConfigError, match="two tools are named 'pay'"):
        load_script(type("Twice", (Account,), {"tools": [Account().pay]}), turns=2)
    with pytest.raises(ConfigError, match="has tools = 3; give a list of functions"):
        load_script(type("Other", (Account,), {"tools": 3}), turns=2)


def test_without_step_a_turn_without_calls_ends_the_episode():
    class Doubles:
        double = staticmethod(double)

        def get_reward(self):
            return 1.0

    class Nothing:  # neither tools nor step: a reward alone
        get_reward = Doubles.get_reward

    episode, (c,), _ = run_conversation(Doubles, [CALL % ("double", '{"x": 4}'), "8"])
    assert (c.info["status"], c.info["turns"], episode.rewards) == ("finished", 2, {ENVIRONMENT_REWARD: 1.0})
    episode, (c,), _ = run_conversation(Nothing, ["8"])
    assert (c.info["status"], c.info["turns"], episode.rewards) == ("finished", 1, {ENVIRONMENT_REWARD: 1.0})


@pytest.mark.parametrize("ends", ["stop", "length"])  # a turn that was cut off is closed by the template
def test_a_call_that_the_template_would_write_otherwise_keeps_its_ids_and_forks_nothing(ends):
    said = ['<tool_call>{"name":"pay",  "arguments":{"amount":5}}</tool_call>', "done"]
    _, (c,), contexts = run_conversation(Account, said, ends=ends)
    assert c.info["tool_calls"] == 1 and "forks" not in c.info
    between = decode(c.tokens[c.versions == -1]).removeprefix("<|im_end|>" * (ends == "length"))
    assert between == "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert c.versions.tolist().count(4) == sum(map(len, said)) + 2 * (ends == "stop")
    assert contexts[1] == contexts[0] + c.tokens.tolist()[: len(contexts[1]) - len(contexts[0])]
    assert contexts[1].count(END) - contexts[0].count(END) == 2  # the model's turn and the tool's, however it ended


def test_a_template_that_rewrites_turns_forks():
    said = ["<think>\na\n</think>\n\n1", "3"]
    _, (first, second), contexts = run_conversation(Guess, said, encode=encoder(None, QWEN3))
    assert first.prefix.tolist() == contexts[0] and second.prefix.tolist() == contexts[1]
    assert second.info["turns"] == 2 and second.info["forks"] == 1 and "think" not in decode(second.prefix)[:-30]
    assert first.messages == ({"role": "assistant", "content": "1", "reasoning_content": "a"},)


@pytest.mark.parametrize(("chat", "applied"), [(False, False), (False, True), (True, False)])
def test_a_step_that_rewrites_the_text_before_it_begins_another_sequence(chat, applied):
    def step(state, action, extra_info):
        rewritten = {"a": f"{state}{action}, then", "b": "In short: 7.", "c": "In short: 7.c, then", "d": None}[action]
        return {"next_state": rewritten, "reward": 0.5, "done": rewritten is None, "extra_info": extra_info}

    encode = PromptEncoder(byte_tokenizer(), apply_chat_template=applied)
    given = [[{"role": "user", "content": text}] if chat else text for text in ("2+3=", "In short: 7.")]
    prompts = [encode({"prompt": source}).tokens.tolist() for source in given]
    made = run_conversation(step_environment(step), list("abcd"), row={"prompt": given[0]}, encode=encode)
    episode, (first, second), contexts = made
    assert episode.rewards == {ENVIRONMENT_REWARD: 2.0} and [c.info["forks"] for c in (first, second)] == [1, 1]
    assert contexts[0] == prompts[0] == episode.prompt.tokens.tolist() and first.prefix is None
    assert contexts[2] == prompts[1] == second.prefix.tolist() and second.info["prompt"] == given[1]
    for c, prompt, later, said in ((first, *contexts[:2], "ab"), (second, *contexts[2:], "cd")):
        assert [*prompt, *c.tokens.tolist()][: len(later)] == later
        assert [i for i in c.tokens[c.versions == 4].tolist() if i != END] == list(said.encode())
        assert [m["content"] for m in c.messages] == [said[0], ", then", said[1]]


class Guess:
    """A game: three numbers to guess; it ends by `done`."""

    async def reset(self, goal=3, **row):
        self.goal, self.tried, self.done = goal, [], False
        return [{"role": "user", "content": "begin"}] if goal > 9 else f" (below {goal + 5})"

    def step(self, message):
        self.tried.append(message["content"])
        self.done = message["content"] == str(self.goal)
        return [{"role": "user", "content": "no"}]

    async def get_reward(self):
        return float(self.done) - 0.1 * len(self.tried)


@pytest.mark.parametrize(("goal", "rest"), [(3, "2+3= (below 8)"), (12, "begin")])
def test_what_reset_returns_is_in_the_episode_s_own_prompt(goal, rest):
    encode = encoder()
    _, (c,), contexts = run_conversation(Guess, [str(goal)], row={"goal": goal})
    content = c.info["prompt"][-1]["content"] if isinstance(c.info["prompt"], list) else c.info["prompt"]
    assert content == rest and c.prefix.tolist() == contexts[0]
    texts = [rest] if goal == 3 else ["2+3=", rest]
    messages = [{"role": "user", "content": text} for text in texts]
    assert encode({"prompt": messages}).tokens.tolist() == contexts[0]


def test_what_reset_adds_counts_in_the_tokens_of_the_episode_and_not_of_the_prompt():
    encode = encoder()
    length = len(encode({"prompt": "2+3="}).tokens)
    encode.max_prompt_length = length
    _, (c,), _ = run_conversation(Guess, ["1", "3"], encode=encode, max_tokens=30)
    added = len(c.prefix) - length
    assert added == len(" (below 8)") and c.info["status"] == "out of context" and len(c.tokens) <= 30 - added
    for limit in ({"max_tokens": added}, {"max_length": length + added}):
        with pytest.raises(DataError, match=f"reset of Guess adds {added} tokens to the prompt"):
            run_conversation(Guess, ["1"], encode=encode, **limit)


def test_an_episode_ends_by_done_and_the_last_turn_reaches_the_environment():
    episode, (c,), contexts = run_conversation(Guess, ["1", "3", "5"])
    assert len(contexts) == 2 and [m["content"] for m in c.messages] == ["1", "no", "3"]
    assert episode.rewards == {ENVIRONMENT_REWARD: pytest.approx(0.8)}
    episode, (c,), contexts = run_conversation(Guess, ["1", "3"], turns=2)
    assert len(contexts) == 2 and episode.rewards == {ENVIRONMENT_REWARD: pytest.approx(0.8)}
    episode, (c,), contexts = run_conversation(Guess, ["1", "2"], turns=2)
    assert c.messages[-1]["content"] == "2" and episode.rewards == {ENVIRONMENT_REWARD: pytest.approx(-0.2)}


def test_an_instance_is_closed_whatever_happens():
    closed = threading.Semaphore(0)

    class Closing(Guess):
        async def close(self):
            closed.release()
            raise OSError("too late")  # a warning, and nothing more

    run_conversation(Closing, ["3"])
    assert closed.acquire(timeout=5)


class Broken(Guess):
    where = "step"

    def __init__(self):
        assert self.where != "init", "no board"

    def reset(self, **row):
        super().reset.__doc__
        assert self.where != "reset", "no game today"
        self.done = False

    def step(self, message):
        return {"step": 1 / 0 if self.where == "step" else "x", "form": 5, "reward": None}[self.where]

    def get_reward(self):
        return "much"


def test_reset_receives_the_columns_that_it_names():
    class Named(Account):
        def reset(self, prompt, start):
            super().reset(prompt, start=start)

    class Misspelt(Account):
        def reset(self, prompt, strat): ...

    row = {"start": 10, "level": "hard"}
    episode, _, _ = run_conversation(Named, ["done"], row=row)
    assert episode.rewards == {ENVIRONMENT_REWARD: 10.0}
    with pytest.raises(RewardError, match=r"reset of Misspelt needs 'strat', .* columns: start, level; did you mean"):
        run_conversation(Misspelt, ["done"], row=row)
    EnvironmentClass(Named).check_columns(row)
    with pytest.raises(ConfigError, match=r"reset of Misspelt needs 'strat', which is not a column; your columns: st"):
        EnvironmentClass(Misspelt).check_columns(row)


@pytest.mark.parametrize(
    ("where", "words", "turns"),
    [
        ("init", "__init__ of Broken raised AssertionError: no board", 0),
        ("reset", "reset of Broken raised AssertionError: no game today", 0),
        ("step", "step of Broken raised ZeroDivisionError", 1),
        ("form", "step of Broken returned 5; return a text or a list of messages", 1),
        ("reward", "get_reward of Broken returned 'much'; return a finite number", 1),
    ],
)
def test_a_method_that_fails_ends_the_run_or_its_own_episode(where, words, turns, monkeypatch):
    monkeypatch.setattr(Broken, "where", where)
    with pytest.raises(RewardError) as told:
        run_conversation(Broken, ["1"])
    assert words in str(told.value)
    episode, (c,), _ = run_conversation(Broken, ["1"], failures=EpisodeFailures("none"))
    assert c.finish_reason == "error" and words in c.info["error"] and not episode.rewards
    assert c.info["turns"] == turns and (c.versions >= 0).sum() == 2 * turns  # a digit and the end, or nothing


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("class World:\n    def __init__(self, size): ...", "World", "missing a required argument: 'size'; give the"),
        ("class World:\n    def reset(self): ...", "World", "has neither tools (public methods) nor step(message)"),
        ("class World:\n    def jump(self): ...", "World", "the tool World.jump needs type hints and a docstring"),
        ("def world(): ...", "world", "not a class; name a class, or the file alone"),
        ("class World: ...", "word", "has no 'word'; did you mean World?"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(text, path, words, tmp_path):
    (tmp_path / "env.py").write_text(text)
    with pytest.raises(ConfigError) as told:
        load_script(f"{tmp_path}/env.py:{path}", turns=2)
    assert words in str(told.value)


@pytest.mark.parametrize(("source", "turns", "told"), [(Guess, 1, 1), (Guess, 2, 0), (lambda messages: [], 1, 1)])
def test_an_environment_whose_answers_nobody_reads_is_told(source, turns, told, caplog):
    config = RolloutConfig(env_path=source, max_turns=turns)
    with caplog.at_level("INFO", logger="whet"):
        load_environments(SimpleNamespace(rollout_for=lambda mode: config))
    assert caplog.text.count("rollout.max_turns=1: an episode is one turn, so the model reads no answer") == told


def test_what_does_not_fit_a_class_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has tools \(check, pay\), and with rollout\.max_turns=1"):
        load_script(Account)
    assert load_script(Guess).environment.has_reward
    with pytest.raises(DataError, match="column 'prompt' besides its prompt"):
        encode = PromptEncoder(byte_tokenizer(), prompt_column="messages")
        run_conversation(Guess, ["1"], row={"messages": "3+3=", "prompt": "2"}, encode=encode)
    with pytest.raises(ConfigError, match="does not support tool calling"):
        run_conversation(Account, ["1"], encode=encoder(None, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    (tmp_path / "run.yaml").write_text("actor: {model: m}\ndata: {path: d.jsonl}\nrollout: {env_path: env.py:World}\n")
    check_eval(load_eval(["--config", str(tmp_path / "run.yaml"), "data=d.jsonl"]))  # its reward is the class's
    assert RunConfig(rollout=RolloutConfig(env_path="env.py:World")).reward_names == ()
    assert RunConfig(rollout=RolloutConfig(env_path="env.py")).reward_names == ("env.py:reward_fn",)


# ---- in training -----------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """A random model's turns call a tool where the sum of the ids before it is odd."""

    def parse(self, tokens, context, tools):
        text = bytes(int(i) for i in tokens if i < 256).decode("latin-1")
        call = {"type": "function", "function": {"name": "count", "arguments": {"by": len(tokens)}}}
        return {"role": "assistant", "content": text, **({"tool_calls": [call]} if sum(map(int, context)) % 2 else {})}

    monkeypatch.setattr(ToolTemplate, "parse", parse)


@pytest.fixture
def world(tmp_path):
    (tmp_path / "env.py").write_text(WORLD)
    (tmp_path / "plain.py").write_text(PLAIN)
    return f"{tmp_path}/env.py:World"


def test_the_trainer_computes_the_logprobs_that_the_sampler_had(world, calls):
    made = learner(world)
    step, batch = batch_of(made)
    at = batch.mask
    assert torch.equal(at, batch.versions >= 0) and at.sum() < len(at)
    want = batch.sampler_logprobs[at]
    torch.testing.assert_close(made.cluster.actor.logprobs(batch).logprobs[at], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one_by_one(made.cluster.actor.module, batch)[at], want, atol=1e-5, rtol=1e-5)
    done = [(group, c) for group in step.groups for c in group.completions]
    assert {c.info["tool_calls"] for _, c in done} > {0} and all("count" in decode(c.prefix) for _, c in done)
    want = []
    for group, c in done:  # the reward, from the messages
        turns = [m for m in c.messages if m["role"] == "assistant"]
        ids = np.split(c.tokens[c.versions >= 0], np.cumsum(turn_lengths(c))[:-1])
        seen = [len(i) if "tool_calls" in m else len(m["content"]) for m, i in zip(turns, ids, strict=True)]
        want.append(sum(seen) / 10 + len(group.prompt.columns["answer"]))
    assert step.rewards.total.tolist() == pytest.approx(want) and dict(step.rewards.table).keys() == {"environment"}


def turn_lengths(c):
    sampled = np.flatnonzero(np.diff([0, *(c.versions >= 0).tolist(), 0]))
    return sampled[1::2] - sampled[::2]


def test_an_episode_is_the_one_that_is_played_by_hand(world, calls):
    """The naive way: greedy decoding token by token without a cache, and the class used directly."""
    made = learner(world, rollout={"eval": {"temperature": 0.0}})
    encode, model = made.encoder(Mode.EVAL), tiny_model(max_position_embeddings=2048)
    prompts = [encode({"prompt": f"{i}?", "answer": str(i)}, i) for i in range(6)]
    namespace, turns = {}, []
    exec(PLAIN, namespace)
    for group in made.rollout(prompts, step=1, mode=Mode.EVAL):
        turns.append(play_by_hand(group, namespace["World"](), model, encode))
    assert max(map(len, turns)) == 3
    assert {True, False} == {called for of in turns for called in of}


def play_by_hand(group, instance, model, encode):
    """Compares a group of one episode with the same episode played by hand. Returns: which turns had a call."""
    (c,) = group.completions
    question, number = group.prompt.source, group.prompt.columns["answer"]
    ids, sampled, called = list(encode({"prompt": question + instance.reset(question, number)}, 0).tokens), [], []
    assert c.prefix.tolist() == ids
    for turn in range(3):
        said = []
        while len(said) < 6 and said[-1:] != [END]:
            said.append(int(model(torch.tensor([[*ids, *said]])).logits[0, -1].argmax()))
        message = ToolTemplate.parse(None, said, ids, [])
        ids += said
        sampled += said
        called.append("tool_calls" in message)
        if "tool_calls" in message:
            count = instance.count(len(said))
            answer = f"<|im_start|>user\n<tool_response>\n{count}\n</tool_response>"
        else:
            answer = instance.step(message)
            answer = answer and f"<|im_start|>user\n{answer}"
        if answer is None or turn == 2:
            break
        text = f"\n{answer}<|im_end|>\n<|im_start|>assistant\n"
        ids += [*([] if said[-1] == END else [END]), *encode.tokenizer(text).input_ids]
    assert [*c.prefix.tolist(), *c.tokens.tolist()] == ids and c.tokens[c.versions >= 0].tolist() == sampled
    assert group.rewards["environment"].tolist() == pytest.approx([instance.get_reward()])
    assert c.info["turns"] == turn + 1
    return called


@pytest.mark.parametrize("kind", [GRPOLearner, PPOLearner])
def test_a_run_resumes_to_the_bit(world, kind, calls, tmp_path):
    data = rows(8, answer=["1"] * 8)
    more = {"eval_every_n_steps": 2, "checkpointing_options": {"save_interval_steps": 1}}
    weights = []
    plain = world.replace("env.py", "plain.py")  # plain methods give what async ones do
    for name, path, steps in (("whole", world, (2,)), ("parts", plain, (1, 2))):
        for last in steps:
            resume = {"resume": "latest"} if last != steps[0] else {}
            made = learner(path, kind, max_steps=last, run_dir=str(tmp_path / name), **more, **resume)
            run = made.train(data, data[:2])
        weights.append(weights_of(made.cluster.actor.module))
    assert same(*weights)
    assert not same(weights[0], weights_of(tiny_model(max_position_embeddings=2048)))
    assert {"rewards/environment", "tools/call_frequency", "turns/mean"} <= run.rows[-1].keys()
    assert run.evaluations and json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])


def test_rewards_of_functions_are_added_and_a_greedy_one_is_refused(world, calls):
    step, _ = batch_of(learner(world, reward=lambda completions, **_: [100.0] * len(completions)))
    assert (step.rewards.total > 100).all() and set(step.rewards.table) == {"environment", "lambda"}
    with pytest.raises(ConfigError, match=r"to which rollout\.env_path gives none"):
        learner(world, algo={"advantage_estimator": "remax", "num_generations": 1})
    environment = lambda completions, **_: [0.0] * len(completions)
    environment.__name__ = "environment"
    with pytest.raises(ConfigError, match=r"like the reward of rollout\.env_path; rename it"):
        learner(world, reward=environment)


# ---- rewards of turns ------------------------------------------------------------------------------------------------


class Rewarded(Guess):
    """The game with a reward for each turn: a tenth of the characters, and none for a turn of one."""

    def step(self, message):
        self.last = message["content"]
        return super().step(message)

    async def get_turn_reward(self):
        return None if len(self.last) == 1 else len(self.last) / 10


@pytest.mark.parametrize("template", [TOOLS, QWEN3])
def test_a_turn_s_reward_is_at_its_last_token_and_in_the_episode_s(template):
    said = ["<think>\na\n</think>\n\n12", "1", "234", "3"]
    episode, made, _ = run_conversation(Rewarded, said, encode=encoder(None, template))
    assert len(made) == (4 if template is QWEN3 else 1)
    want = [0.2, 0.0, 0.3, 0.0]  # step is given the text without the thinking
    assert episode.rewards == {ENVIRONMENT_REWARD: pytest.approx(sum(want) + 1 - 0.4)}
    found = np.concatenate([c.token_rewards[c.versions >= 0] for c in made])
    lengths = [len(text) + 1 for text in said]
    assert found[np.cumsum(lengths) - 1].tolist() == want and np.count_nonzero(found) == 2
    assert all((c.token_rewards[c.versions < 0] == 0).all() for c in made)


@pytest.mark.parametrize("kind", [GRPOLearner, PPOLearner])
def test_estimators_get_the_rewards_of_turns(kind, calls, tmp_path):
    """Advantages by hand: with turn_rloo the return from the turn on less the other's; with gae without a discount."""
    turn_reward = "    def get_turn_reward(self):\n        return len(self.seen) * self.seen[-1] / 8\n\n"
    text = WORLD.replace("    async def get_reward", turn_reward + "    async def get_reward")
    (tmp_path / "env.py").write_text(text)
    algo = {"advantage_estimator": "turn_rloo", "num_generations": 2, "gamma": 0.5}
    if kind is PPOLearner:
        algo = {"num_generations": 2, "gae_lambda": 1.0, "gamma": 1.0, "whiten_advantages": False}
    made = learner(f"{tmp_path}/env.py:World", kind, algo=algo)
    step, _ = batch_of(made, 3)
    batch = made.assign_advantages(made.score(made.batch(step))).batch
    gamma, returns = algo["gamma"], []
    for c, total in zip([c for g in step.groups for c in g.completions], step.rewards.total, strict=True):
        ends = np.cumsum(turn_lengths(c)) - 1
        each = c.token_rewards[c.versions >= 0][ends]
        assert len(each) == c.info["turns"] and (each > 0).all() and c.token_rewards.sum() == pytest.approx(each.sum())
        each[-1] += total - each.sum()  # the outcome
        returns.append([sum(gamma ** (m - k) * each[m] for m in range(k, len(each))) for k in range(len(each))])
    assert len({len(of) for of in returns}) > 1
    advantages = np.split(batch.advantages.numpy(), batch.ends[:-1].numpy())
    values = None if kind is GRPOLearner else np.split(batch.values.numpy(), batch.ends[:-1].numpy())
    for i, c in enumerate(c for g in step.groups for c in g.completions):
        other, turn = returns[i ^ 1], np.repeat(np.arange(len(returns[i])), turn_lengths(c))
        baseline = [other[min(k, len(other) - 1)] for k in turn] if values is None else values[i][c.versions >= 0]
        want = np.array([returns[i][k] for k in turn]) - baseline
        assert advantages[i][c.versions >= 0] == pytest.approx(want, abs=1e-4)


def test_a_reward_of_a_turn_that_is_no_number_is_refused():
    class Wrong(Rewarded):
        def get_turn_reward(self):
            return float("inf")

    with pytest.raises(RewardError, match="get_turn_reward of Wrong returned inf; return a finite number"):
        run_conversation(Wrong, ["1"])
