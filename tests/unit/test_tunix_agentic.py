"""Programs of Tunix's agentic learner with their imports changed: they run, learn, and keep what the model sampled."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import END, tiny_model

from whet.data.tokenizer import byte_tokenizer
from whet.envs.failures import EpisodeFailures
from whet.envs.recorded import RecordedAnswers
from whet.errors import ConfigError, RewardError
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode, RolloutDriver
from whet.rollout.mock import MockEngine
from whet.serve.run_model import RunModel
from whet.tunix import AgenticGRPOConfig, AgenticGRPOLearner, ClusterConfig, OptimConfig, RLEngine, RLTrainingConfig
from whet.tunix import RolloutConfig as TunixRolloutConfig
from whet.tunix.agentic import (
    CalculatorTool,
    ModelAgent,
    ToolAgent,
    ToolEnvironment,
    agent_types,
    base_agent,
    base_environment,
    base_tool,
    parser,
    reward,
    task_environment,
    tool_manager,
    trajectory_collect_engine,
)
from whet.tunix.agentic.episodes import AgenticEpisodes
from whet.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
Status = agent_types.TrajectoryStatus


def tokenizer():
    tokens = byte_tokenizer()
    tokens.chat_template = TEMPLATE
    return tokens


# ---- a program -------------------------------------------------------------------------------------------------------


class LetterAgent(base_agent.ConversationAgentBase):
    """Writes conversation and steps itself, in the manner of Tunix's FrozenLake agent."""

    def __init__(self, system_prompt=None, use_hint=True):
        super().__init__(system_prompt="Say a letter." if use_hint else "")

    def _observation_to_messages(self, observation, reward, done, info):
        assert info["max_steps"] == 2
        self._messages.append({"role": "user", "content": str(observation)})

    def update_from_model(self, response, **kwargs):
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(agent_types.Step(model_response=response, thought="none"))
        self.step += 1
        return agent_types.Action(action=response)


class LetterEnv(base_environment.BaseTaskEnv):
    """Half a point for a turn whose letters all stand before `below`, and else a part of it."""

    closed = 0

    def __init__(self, entry, group_id=None, pair_index=None, max_steps=2, **kwargs):
        super().__init__(task=entry, max_steps=max_steps)
        self.below, self.group = entry["below"].item(), (group_id, pair_index)

    def _initial_observation(self):
        return self.task["prompts"].item()

    def _step_impl(self, action):
        point = 0.5 * sum("A" <= letter < self.below for letter in action) / max(1, len(action))
        return base_environment.EnvStepResult(observation="again", reward=point, done=False, info={})

    def close(self):
        type(self).closed += 1


def program(steps, rows=4, env_kwargs=None, **options):
    """The part of a program that makes engine and learner, as Tunix's examples write it."""
    cluster_config = ClusterConfig(
        role_to_mesh={},
        rollout_engine="vanilla",
        training_config=RLTrainingConfig(
            actor_optimizer=OptimConfig(lr=2e-2),
            eval_every_n_steps=50,
            max_steps=steps,
            pbar_description=None,
            **options.pop("training", {}),
        ),
        rollout_config=TunixRolloutConfig(
            max_tokens_to_generate=6,
            max_prompt_length=48,
            kv_cache_size=128,
            return_logprobs=True,
            **options.pop("rollout", {}),
        ),
    )
    rl_engine = RLEngine(actor=tiny_model(), reference=None, tokenizer=tokenizer(), cluster_config=cluster_config)
    config = {"num_generations": 8, "beta": 0.0, "max_response_length": 32, "max_concurrency": 8}
    grpo_config = AgenticGRPOConfig(**{**config, **options.pop("config", {})})
    learner = options.pop("learner", AgenticGRPOLearner)(
        rl_engine=rl_engine,
        algo_config=grpo_config,
        **{"agent_class": LetterAgent, "env_class": LetterEnv, "env_kwargs": env_kwargs or {"max_steps": 2}, **options},
    )
    batch = {"prompts": np.array(["Letter?"] * rows), "below": np.array(["n"] * rows)}
    return learner, [batch] * steps


def test_a_program_of_two_turns_learns_and_closes_its_environments():
    LetterEnv.closed = 0
    learner, data = program(
        10, rows=2, metric_fns=[lambda completions, **_: {"own/first": (len(completions[0]), np.mean)}]
    )
    run = learner.train(data)
    learner.close()
    rewards = [row["rewards/environment"] for row in run.rows]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    assert LetterEnv.closed == 10 * 2 * 8 and "own/first" in run.rows[0]
    assert run.rows[0]["turns/mean"] > 1 and run.rows[0]["reward"] == pytest.approx(rewards[0])


def test_reward_functions_are_given_the_last_turn_and_add_to_the_trajectory_s_reward():
    seen = []

    def length(prompts, completions, below, **kwargs):
        seen.append((prompts[0], below[0], completions[0]))
        return [float(len(text)) for text in completions]

    learner, data = program(1, rows=2, reward_fns=length)
    run = learner.train(data)
    learner.close()
    assert seen[0][:2] == ("Letter?", "n") and isinstance(seen[0][2], str)
    (row,) = run.rows
    assert row["reward"] == pytest.approx(row["rewards/environment"] + row["rewards/length"])


def test_a_subclass_may_create_the_pair_and_a_parser_of_one_s_own_writes_the_conversation():
    class Raw:
        def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
            return "|".join(message["content"] for message in messages)

    assert parser.QwenChatTemplateParser(tokenizer()).parse([{"role": "user", "content": "a"}]) == "u:a\n"

    class Mine(AgenticGRPOLearner):
        pairs = 0

        def _create_agent_env_pair(self, single_example, group_id, pair_index):
            Mine.pairs += 1
            return super()._create_agent_env_pair(single_example, group_id=group_id, pair_index=pair_index)

    learner, data = program(1, rows=1, learner=Mine, chat_parser=Raw())
    run = learner.train([{**batch, "prompts": np.array([""])} for batch in data])  # as Tunix's FrozenLake example
    learner.close()
    assert Mine.pairs == 8 and np.isfinite(run.rows[0]["reward"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"off_policy_steps": 1}}, "off_policy_steps must be 0"),
        ({"config": {"num_generations": 1}}, "num_generations must be greater than 1"),
        ({"config": {"filter_statuses": {"TIMEOUT"}}}, "give a set of TrajectoryStatus"),
        ({"env_kwargs": {"group_id": 3}}, "which the learner sets for each episode"),
        ({"chat_parser": object()}, "without parse"),
    ],
)
def test_what_cannot_be_done_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        program(1, **change)


def test_a_method_that_is_never_called_can_t_be_replaced():
    with pytest.raises(ConfigError, match=r"Mine._process_results would never be called"):
        type("Mine", (AgenticGRPOLearner,), {"_process_results": lambda self: None})
    with pytest.raises(ImportError, match="the driver of rollouts runs all episodes"):
        from whet.tunix.agentic import RolloutOrchestrator  # noqa: F401


# ---- one episode -----------------------------------------------------------------------------------------------------


class Says(MockEngine):
    """An engine that says texts, one after the other."""

    def __init__(self, *texts):
        super().__init__()
        self.texts, self.contexts = itertools.cycle(texts), []

    def submit(self, requests):
        self.contexts += [bytes(i for i in r.tokens.tolist() if i < 256).decode() for r in requests]
        self.outputs = []
        for r in requests:
            ids = np.array([*next(self.texts).encode(), END][: r.sampling.max_tokens], np.int32)
            columns = {"logprobs": np.full(len(ids), -0.5, np.float32), "versions": np.zeros(len(ids), np.int32)}
            reason = "stop" if ids[-1] == END else "length"
            self.outputs.append(Output(id=r.id, tokens=ids, **columns, finish_reason=reason))

    def step(self, timeout_s=None):
        outputs, self.outputs = self.outputs, []
        return outputs


def play(agent, env, *texts, longest=None, failures=None, **options):
    """An episode in which the model says these texts: the completions, the episode, the engine."""
    tokens, policy = tokenizer(), Says(*texts)
    model = RunModel(tokens, (END,), name="policy", longest=longest)
    episodes = AgenticEpisodes(lambda episode: (agent, env), model, failures or EpisodeFailures(), **options)
    prompt = Prompt(tokens=np.array([5], np.int32), source="2+3=", row=0)
    episode = Episode(prompt, (0, 0, 0, 0), lambda e: episodes.run_episode(e, Sampling(max_tokens=100)))
    rollouts = RolloutDriver(policy)
    try:
        (group,) = rollouts.run([episode])
    finally:
        rollouts.close()
    return group.completions, episode, policy


CALL = '<tool_call>{"name": "calculator", "arguments": {"a": 2, "b": 3, "op": "+"}}</tool_call>'


def tools(reward_fn=None, **options):
    tool_map = {"calculator": CalculatorTool}
    task = {"prompts": "2+3=", "ground_truth": "5"}
    env = ToolEnvironment(task, tool_map=tool_map, reward_fn=reward_fn or reward.exact_match, **options)
    return ToolAgent("", tool_map=tool_map), env


def test_a_tool_s_answer_follows_the_turn_and_sampled_ids_alone_are_trained():
    (c,), episode, policy = play(*tools(), CALL, "5")
    assert episode.rewards == {"environment": 1.0} and c.info["status"] == "finished" and c.info["turns"] == 2
    sampled = bytes(i for i in c.tokens[c.versions >= 0].tolist() if i < 256).decode()
    assert sampled == CALL + "5"
    assert policy.contexts[1].endswith("\nt:Tool returned result: 5\na:") and policy.contexts[1].count(CALL) == 1
    assert '"name": "calculator"' in policy.contexts[0] and "Calculates with two numbers" in policy.contexts[0]
    assert c.logprobs[c.versions >= 0].tolist() == [-0.5] * (len(CALL) + 3) and c.finish_reason == "stop"
    assert c.token_rewards[-1] == 1.0 and c.token_rewards.sum() == 1.0


def test_an_agent_that_shortens_its_history_forks_and_no_token_is_lost():
    class Forgets(ModelAgent):
        def _observation_to_messages(self, observation, reward, done, info):
            super()._observation_to_messages(observation, reward, done, info)
            self._messages[:] = self._messages[-1:]

    class Twice(base_environment.BaseTaskEnv):
        def _initial_observation(self):
            return "one"

        def _step_impl(self, action):
            return base_environment.EnvStepResult("two", 1.0, False, {})

    completions, episode, policy = play(Forgets("x"), Twice(max_steps=2), "a", "b")
    assert policy.contexts == ["u:one\na:", "u:two\na:"] and episode.rewards["environment"] == 2.0
    assert [bytes(c.tokens[:-1].tolist()).decode() for c in completions] == ["a", "b"]
    assert all(c.info["forks"] == 1 for c in completions)


def test_a_late_environment_ends_its_episode_without_a_reward_and_one_that_raises_is_a_failure():
    agent, env = tools(reward_fn=lambda task, action: time.sleep(0.4) or 1.0)
    (c,), episode, _ = play(agent, env, "5", timeout=0.1)
    assert c.finish_reason == "error" and episode.rewards == {}
    assert (c.info["status"], c.info["failure"]) == ("timed out", "environment")
    agent, env = tools(reward_fn=lambda task, action: 1 / 0)
    with pytest.raises(RewardError, match="step of the environment raised ZeroDivisionError"):
        play(agent, env, "5")
    (c,), episode, _ = play(agent, env, "5", failures=EpisodeFailures("none"))
    assert (c.finish_reason, c.info["failure"], episode.rewards) == ("error", "environment", {})


def wait_until(condition):
    """Waits for what a thread does that nobody waits for."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


class Clock(base_environment.BaseTaskEnv):
    """Says the time, which never repeats, and how often it was asked."""

    asked, closed = itertools.count(1), 0

    def _initial_observation(self):
        return f"{next(Clock.asked)} {time.monotonic_ns()}"

    def _step_impl(self, action):
        return base_environment.EnvStepResult(self._initial_observation(), float(len(action)), False, {})

    def close(self):
        Clock.closed += 1


def test_recorded_episodes_are_played_again_without_agent_and_environment(tmp_path):
    def played(*texts, **options):
        answers = RecordedAnswers(tmp_path)
        completions, episode, policy = play(ModelAgent("x"), Clock(max_steps=3), *texts, answers=answers, **options)
        return [c.tokens.tolist() for c in completions], episode.rewards, policy.contexts, completions[0].token_rewards

    Clock.asked = itertools.count(1)
    first = played("a", "bb", "c")
    assert first[1] == {"environment": 4.0} and next(Clock.asked) == 5
    again = played("a", "bb", "c")
    assert again[:3] == first[:3] and next(Clock.asked) == 6 and np.array_equal(again[3], first[3])
    assert len(next(tmp_path.iterdir()).read_text()) < 900  # a turn adds to the record what it adds to the history
    assert played("a", "other", "c")[1] == {"environment": 7.0} and next(Clock.asked) == 11
    assert len(played("a", "other", "c", max_response_length=30)[2]) < 3  # not the episode of another limit


def test_the_learner_records_where_the_rollout_s_configuration_says(tmp_path):
    rewards = []
    for env in (Clock, None):  # the second run has no environment to ask
        learner, data = program(1, rows=1, agent_class=ModelAgent, env_class=env, env_kwargs={"max_steps": 2},
                                rollout={"answers_dir": str(tmp_path)})  # fmt: skip
        run = learner.train(data)
        learner.close()
        rewards.append((run.rows[0]["rewards/environment"], run.rows[0]["loss"]))
    assert rewards[0] == rewards[1]


class Ends:
    """Raises StopIteration where it is told to, as an iterator that has ended does."""

    def __init__(self, where):
        self.where = where

    def __call__(self, where):
        if where == self.where:
            next(iter(()))


@pytest.mark.parametrize("where", ["reset", "step", "final_reward", "agent"])
def test_an_iterator_that_ends_in_the_user_s_code_ends_the_episode_as_an_error(where):
    ends = Ends(where)

    class Env(Clock):
        def reset(self):
            ends("reset")
            return super().reset()

        def step(self, action):
            ends("step")
            return super().step(action)

        def final_reward_fn(self):
            ends("final_reward")
            return 0.0

    class Agent(ModelAgent):
        def update_from_model(self, response, **kwargs):
            ends("agent")
            return super().update_from_model(response)

    Clock.closed = 0
    (c,), episode, _ = play(Agent("x"), Env(max_steps=1), "a", failures=EpisodeFailures("none"))
    assert (c.info["status"], c.info["failure"], episode.rewards) == ("error", "environment", {})
    assert "raised RuntimeError: the function raised StopIteration()" in c.info["error"]
    wait_until(lambda: Clock.closed == 1)

    async def call(messages, env, **kwargs):
        return SimpleNamespace(text=["a"], tokens=[np.array([97])], logprobs=None)

    engine = trajectory_collect_engine.TrajectoryCollectEngine(Agent("x"), Env(max_steps=1), model_call=call)
    with pytest.raises(RuntimeError, match="the function raised StopIteration"):
        asyncio.run(asyncio.wait_for(engine.collect(), 5))


@pytest.mark.parametrize("after", [0, 1])
def test_an_agent_without_messages_fails_and_its_environment_is_closed(after):
    class Empty(ModelAgent):
        def update_from_env(self, observation, reward, done, info=None, **kwargs):
            super().update_from_env(observation, reward, done, info)
            if len(self.trajectory.steps) == after:
                self._messages.clear()

    Clock.closed = 0
    with pytest.raises(RewardError, match="chat_completions of Empty is empty, and the model has another turn"):
        play(Empty("x"), Clock(max_steps=3), "a")
    wait_until(lambda: Clock.closed == 1)


@pytest.mark.parametrize("where", ["reset", "close"])
def test_an_environment_that_hangs_is_late(where, monkeypatch):
    monkeypatch.setattr("whet.tunix.agentic.episodes.FINISH_S", 0.1)

    class Hangs(Clock):
        def reset(self):
            time.sleep(0.4 if where == "reset" else 0)
            return super().reset()

        def close(self):
            time.sleep(0.4 if where == "close" else 0)

    (c,), episode, _ = play(ModelAgent("x"), Hangs(max_steps=1), "a", failures=EpisodeFailures("none"), timeout=0.1)
    assert (c.info["status"], c.info["failure"], episode.rewards) == ("timed out", "environment", {})


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        ({}, "out of context", "length"),
        ({"overlong_filter": True}, "out of context", "length"),
        ({"overlong_filter": True, "filter_statuses": {Status.TIMEOUT}}, "out of context", "stop"),
        ({"max_response_length": 999}, "finished", "stop"),
    ],
)
def test_overlong_episodes_are_masked_by_their_status(options, status, reason):
    (c,), _, _ = play(*tools(max_steps=3), CALL, **{"max_response_length": 60, **options})
    assert (c.info["status"], c.finish_reason) == (status, reason)
    assert len(c.tokens) == 60 or status == "finished"


# ---- the parts -------------------------------------------------------------------------------------------------------


def test_an_episode_is_collected_in_four_modes_with_a_model_of_any_kind():
    texts = iter([CALL, "5"] * 2)

    async def model_call(messages, env, max_generation_steps=None):
        ids = list(next(texts).encode())
        return SimpleNamespace(text=[bytes(ids).decode()], tokens=[ids], logprobs=[[-1.0] * len(ids)])

    def collect(mode):
        agent, env = tools(group_id=3)
        options = {"tokenizer": tokenizer(), "chat_parser": parser.ChatTemplateParser(tokenizer()), "gamma": 0.5}
        engine = trajectory_collect_engine.TrajectoryCollectEngine(agent, env, model_call=model_call, **options)
        return asyncio.run(engine.collect(mode))

    token = collect("Token")
    assert token["status"] == "SUCCEEDED" and token["trajectory_reward"] == 1.0 and token["group_id"] == 3
    mask, ids = token["conversation_masks"], token["conversation_tokens"]
    assert bytes(ids[mask == 1].tolist()).decode() == CALL + "5"
    assert bytes(ids[mask == 0].tolist()).decode() == "t:Tool returned result: 5\na:"
    assert token["old_logprobs"].tolist() == np.where(mask == 1, -1.0, 0.0).tolist()
    trajectory = collect("Trajectory")
    assert [step.mc_return for step in trajectory.steps] == [0.5, 1.0] and trajectory.to_dict()["reward"] == 1.0
    texts = iter([CALL, "5"] * 2)
    assert [step["done"] for step in collect("Steps")] == [False, True]
    assert [m["role"] for m in collect("Conversation")] == ["system", "user", "assistant", "tool", "assistant"]
    with pytest.raises(ConfigError, match="unknown mode 'Words'"):
        collect("Words")


def test_tools_answer_in_order_at_the_same_time_and_errors_are_answers():
    class Slow(base_tool.BaseTool):
        """Waits."""

        def get_json_schema(self):
            return {}

        async def apply_async(self, **kwargs):
            await asyncio.sleep(0.2)
            return base_tool.ToolOutput(self.name, output=kwargs)

    manager = tool_manager.ToolManager({"slow": Slow, "calculator": CalculatorTool})
    calls = [base_tool.ToolCall("slow", {"n": i}) for i in range(8)] + [
        base_tool.ToolCall("nothing", {}),
        base_tool.ToolCall("calculator", {"a": 1, "b": 0, "op": "/"}),
    ]
    started = time.monotonic()
    answers = list(manager.execute_calls(calls).values())
    assert time.monotonic() - started < 1.0
    assert answers[:2] == ['{"n": 0}', '{"n": 1}']
    assert answers[8:] == ["Error: Tool 'nothing' not registered.", "Error: Division by zero is not allowed"]
    with pytest.raises(AttributeError, match="Cannot modify immutable Slow"):
        manager.get_tools()[0].description = "another"
    with pytest.raises(TypeError, match="Cannot instantiate abstract tool class 'x'"):
        tool_manager.ToolManager({"x": base_tool.BaseTool})
    manager.register_mcp_tool(SimpleNamespace(name="any", apply=lambda n: base_tool.ToolOutput("any", output=n)))
    assert manager.run("any", n=3).output == 3  # of no class of Tunix's
    with pytest.raises(KeyError, match="unknown reward 'exact'; did you mean exact_match"):
        reward.get_reward_fn("exact")


def test_the_parser_reads_calls_and_leaves_out_what_is_none():
    agent, _ = tools()
    broken = '<tool_call>{"name": 1</tool_call>' + CALL + '<tool_call>{"name": "x"}</tool_call>'
    (call,) = agent.update_from_model(broken).action
    assert call["function"] == {"name": "calculator", "arguments": '{"a": 2, "b": 3, "op": "+"}'}
    (finish,) = agent.update_from_model("5").action
    assert finish["function"] == {"name": "finish", "arguments": {"response": "5"}}
    one_turn = task_environment.TaskEnvironment.from_dict({"prompts": "x", "reward_fn": lambda task, action: 2.0})
    assert one_turn.step(agent_types.Action(action="y")) == ({}, 2.0, True, {"response": "y"})
