"""Episodes of several turns: which tokens the model sees, which are trained, and what happens when the world fails."""

import asyncio
import functools
import json
import math
import time

import numpy as np
import pytest
import torch
from environment_runs import TOOLS
from helpers import cluster, one_by_one, rows, same, tiny_model, weights_of
from tokenizers import processors

from whet.config import DataConfig, GRPOConfig, Mode, PPOConfig
from whet.config.evaluate import check_eval, load_eval
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import byte_tokenizer
from whet.envs import ChatTranscript, Conversation, Script, load_script
from whet.envs.failures import EpisodeFailures
from whet.errors import ConfigError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.step import Step
from whet.rollout.base import Output, Sampling
from whet.rollout.driver import Episode
from whet.rollout.external_calls import ExternalCall, ExternalCalls
from whet.types import TokenBatch

FORGETFUL = (  # earlier turns of the assistant lose what stands before the bar
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'].split('|')[-1] if m['role'] == 'assistant' and not "
    "loop.last else m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
SUM = {"prompt": "2+3=", "answer": "5"}


def encoder(template=None, **options):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return PromptEncoder(tokenizer, apply_chat_template=True, **options)


def run_conversation(said, interact, encode, *, row=SUM, turns=5, tokens=10_000, each=100, ends="stop", **options):
    """An episode in which the model says these texts; its completions, and what the model was given each time."""
    talk = Conversation(Script(name="world", interact=interact), encode, max_turns=turns, max_tokens=tokens, **options)
    run = functools.partial(talk.run_episode, sampling=Sampling(max_tokens=each))
    turns_of_it, contexts, said = run(Episode(encode(row, 7), (0, 1, 2, 3), run)), [], iter(said)
    calls = ExternalCalls()
    try:
        request = next(turns_of_it)
        while True:
            if isinstance(request, ExternalCall):
                calls.start(0, request)
                (result,) = calls.collect()
                failed = result.error is not None
                request = turns_of_it.throw(result.error) if failed else turns_of_it.send(result.value)
                continue
            contexts.append((request.tokens.tolist(), request.sampling.max_tokens, request.draw))
            ids = [*encode.tokenizer(next(said)).input_ids, *([256] if ends == "stop" else [])]
            ids = np.array(ids[: request.sampling.max_tokens], np.int32)
            columns = {"logprobs": np.full(len(ids), -1.0), "versions": np.full(len(ids), 4)}
            request = turns_of_it.send(Output(id=0, tokens=ids, **columns, finish_reason=ends))
    except StopIteration as end:
        return end.value, contexts
    finally:
        calls.close()


def twice(messages):
    """Answers the model's first turn alone."""
    return [{"role": "tool", "content": "5"}] if len(messages) == 2 else []


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["stop", "length"])  # a turn that was cut off is closed by the template
def test_what_follows_a_turn_is_what_the_template_adds_and_is_not_trained(ends):
    encode = encoder()
    (made,), contexts = run_conversation(["calc", "five"], twice, encode, ends=ends)
    messages = [{"role": "user", "content": "2+3="}, *made.messages]
    whole = encode.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)[:-1]  # the last line feed
    assert (contexts[0][0] + made.tokens.tolist() + [256] * (ends == "length")) == whole
    sampled = made.tokens[made.versions == 4]
    assert encode.tokenizer.decode(sampled, skip_special_tokens=True) == "calcfive"
    assert (made.versions[made.versions != 4] == -1).all() and (made.logprobs[made.versions == -1] == 0).all()
    assert made.info == {"status": "finished", "turns": 2} and made.finish_reason == ends and made.generation == 3
    assert [m["content"] for m in made.messages] == ["calc", "5", "five"]
    assert contexts[1][0] == contexts[0][0] + made.tokens[: -len(sampled) + 4 + (ends == "stop")].tolist()
    assert contexts[1][2] == 100  # no draw of the first turn is used again


@pytest.mark.parametrize("ends", ["abort", "error"])
def test_a_turn_that_the_engine_gave_up_is_not_answered(ends):
    asked = []
    mask = EpisodeFailures(on_infrastructure="mask")
    (made,), contexts = run_conversation(
        ["a", "b"], lambda m: asked.append(m) or twice(m), encoder(), ends=ends, failures=mask
    )
    assert asked == [] and len(contexts) == 1 and made.has_failed and made.info["failure"] == "infrastructure"
    assert made.info["error"] == f"the engine gave up a turn of the model (finish_reason '{ends}')"


def test_each_episode_is_a_conversation_of_its_own_and_its_turns_are_one():
    encode = encoder()
    script = Script(name="world", interact=twice)
    talk = Conversation(script, encode, max_turns=2, max_tokens=100)
    run = functools.partial(talk.run_episode, sampling=Sampling(max_tokens=9))
    requests = []
    for generation in (0, 1):
        turns_of_it = run(Episode(encode(SUM, 7), (0, 1, 2, generation), run))
        requests.append([next(turns_of_it)])
        ids = np.array([65, 256], np.int32)
        said = Output(id=0, tokens=ids, logprobs=np.full(2, -1.0), versions=np.full(2, 4), finish_reason="stop")
        turns_of_it.send(said)  # the call of interact
        requests[-1].append(turns_of_it.send([{"role": "tool", "content": "5"}]))
    names = [[request.conversation for request in of] for of in requests]
    assert names[0][0] == names[0][1] != names[1][0] == names[1][1]


def test_a_prompt_of_plain_text_is_continued_by_contents_alone():
    encode = PromptEncoder(byte_tokenizer())
    (made,), _ = run_conversation(["calc", "!"], twice, encode)
    assert bytes(int(t) for t in made.tokens if t < 256) == b"calc5!"
    assert made.tokens.tolist().count(256) == 2  # that a turn has ended stays where it was sampled


def test_a_template_that_rewrites_an_earlier_turn_forks_the_episode():
    encode = encoder(FORGETFUL)
    (first, second), contexts = run_conversation(["think|calc", "five"], twice, encode)
    assert first.prefix is None and bytes(first.tokens[:-1].tolist()) == b"think|calc"
    assert second.prefix.tolist() == contexts[1][0]
    assert encode.tokenizer.decode(second.prefix) == "[u]2+3=<|im_end|>[a]calc<|im_end|>[t]5<|im_end|>[a]"
    assert (first.versions == 4).all() and (second.versions == 4).all()  # each token trained where it was sampled
    assert first.generation == second.generation == 3 and second.info == {"status": "finished", "turns": 2, "forks": 1}
    assert [len(c.messages) for c in (first, second)] == [1, 3]


def test_a_fork_begins_with_what_the_template_writes_alone():
    encode = encoder(FORGETFUL)
    encode.tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", 256)]
    )
    talk, ids = ChatTranscript(encode(SUM, 0), encode), np.array([*b"think|calc", 256], np.int32)
    talk.add_turn(Output(id=0, tokens=ids, logprobs=np.zeros(11), versions=np.zeros(11, int), finish_reason="stop"))
    talk.add_answer([{"role": "tool", "content": "5"}])
    assert talk.context.tolist() == [*b"[u]2+3=", 256, *b"[a]calc", 256, *b"[t]5", 256, *b"[a]"]


def test_a_prompt_that_ends_in_the_models_own_turn_is_continued():
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "well, "}], "answer": ""}
    seen = []
    (made,), _ = run_conversation(
        ["yes", "no"], lambda m: seen.append(m) or twice(m), encoder(on_answered="continue"), row=row
    )
    assert [m["content"] for m in seen[0]] == ["?", "well, yes"] and made.info["turns"] == 2
    assert [m["content"] for m in made.messages] == ["yes", "5", "no"]


def test_the_template_is_given_the_tools():
    encode = encoder(
        "{{ tools[0]['name'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}", tools=[{"name": "hm"}]
    )
    assert bytes(encode(SUM).tokens.tolist()) == b"hm2+3="
    with pytest.raises(ConfigError, match="only a chat template can describe tools"):
        PromptEncoder(byte_tokenizer(), tools=[{"name": "hm"}])(SUM)


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_a_transcript_goes_on_from_a_removed_answer_as_if_it_had_not_been(template):
    encode, end = encoder(template), {"versions": np.zeros(4, int), "finish_reason": "stop"}
    once, twice_over = (ChatTranscript(encode(SUM, 0), encode) for _ in range(2))
    for talk in (once, twice_over):
        talk.add_turn(Output(id=0, tokens=np.array([*b"a|b", 256], np.int32), logprobs=np.zeros(4), **end))
    before = twice_over.context.tolist()
    twice_over.add_answer([{"role": "tool", "content": "too long"}])
    twice_over.remove_answer()
    assert twice_over.context.tolist() == before and twice_over.messages == once.messages
    for talk in (once, twice_over):
        talk.add_answer([{"role": "tool", "content": "5"}])
    assert twice_over.context.tolist() == once.context.tolist() and twice_over.messages == once.messages


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_an_episode_ends_after_its_last_turn_without_asking_the_world():
    asked = []
    (made,), contexts = run_conversation(
        ["a", "b", "c"], lambda m: asked.append(len(m)) or [{"role": "tool", "content": "-"}], encoder(), turns=2
    )
    assert len(contexts) == 2 and asked == [2] and made.info["turns"] == 2


@pytest.mark.parametrize(("limit", "lengths"), [("tokens", [5, 4]), ("positions", [5, 4]), ("none", [5, 5])])
def test_a_turn_has_no_more_tokens_than_are_left_in_all(limit, lengths):
    encode = PromptEncoder(byte_tokenizer())
    most = {"tokens": {"tokens": 10}, "positions": {"max_length": 14}, "none": {}}[limit]
    (made,), contexts = run_conversation(["abcde", "fghij"], twice, encode, each=5, ends="length", **most)
    assert [c[1] for c in contexts] == lengths
    assert len(made.tokens) == sum(lengths) + 1 and made.finish_reason == "length"


def test_what_leaves_room_for_no_token_at_all_is_taken_back():
    (made,), contexts = run_conversation(["abcde", "fghij"], twice, PromptEncoder(byte_tokenizer()), each=5, tokens=6)
    assert len(contexts) == 1 and len(made.tokens) == 5 and made.finish_reason == "length"


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_what_leaves_no_room_for_an_answer_is_taken_back(template):
    loud = lambda messages: [{"role": "tool", "content": "x" * 100}]
    (made,), contexts = run_conversation(["a|b"], loud, encoder(template), tokens=50)
    assert len(contexts) == 1 and (made.versions == 4).all() and made.prefix is None
    assert made.finish_reason == "length" and [m["content"] for m in made.messages] == ["a|b"]


# ---- a world that fails ----------------------------------------------------------------------------------------------


def boom(messages):
    raise KeyError("no such tool")


FAILURES = [
    (boom, "interact of world raised KeyError: 'no such tool'"),
    (lambda messages: time.sleep(60), "interact of world returned nothing within 0.05 s"),
    (lambda messages: None, "interact of world returned None; return a list of messages"),
    (lambda messages: ["5"], "message 0: '5'; a message has a role and a content"),
    (lambda messages: [{"role": "assistant", "content": "5"}], "has the role 'assistant'; use user, tool or system"),
    (lambda messages: [{"role": "tool", "content": 5}], "the content is 5; give a text"),
    (
        lambda messages: [{"role": "tool", "content": "\ud800"}],
        "is not valid text (surrogates not",
    ),
    (lambda messages: [{"role": "world", "content": "5"}], "has the role 'world'; use user, tool or system"),
]


@pytest.mark.parametrize(("interact", "words"), FAILURES)
def test_an_interact_that_fails_ends_the_run_or_its_own_episode(interact, words, caplog):
    with pytest.raises(RewardError) as told:
        run_conversation(["a"], interact, encoder(), timeout_s=0.05)
    assert words in str(told.value) and "reward_workers" not in str(told.value)  # which interact is not run by
    (made,), _ = run_conversation(["a"], interact, encoder(), timeout_s=0.05, failures=EpisodeFailures("none"))
    assert made.finish_reason == "error" and words in made.info["error"]
    assert words in caplog.text and "row 7, generation 3 has no reward" in caplog.text


def test_interact_may_be_async():
    async def answers(messages):
        await asyncio.sleep(0)
        return twice(messages)

    (made,), _ = run_conversation(["calc", "five"], answers, encoder())
    assert [m["content"] for m in made.messages] == ["calc", "5", "five"]


def test_interact_may_change_the_messages_that_it_is_given():
    def careless(messages):
        messages[0]["content"] = messages[-1]["content"] = "gone"
        return [] if len(messages) > 2 else [{"role": "user", "content": "and?"}]

    (made,), _ = run_conversation(["a", "b"], careless, encoder())
    assert [m["content"] for m in made.messages] == ["a", "and?", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "has neither interact(messages) nor reward_fn(messages, answer); write one"),
        ("async def step(state, action, extra_info): ...", "is written for a later form of RL2"),
        ("def reward_fn(messages, answer): ...", "has no interact(messages), which rollout.max_turns above 1 calls"),
        ("def interact(messages, state): ...", "is called as interact(messages): missing a required argument"),
        ("async def interact(messages): yield []", "is a generator, since it yields; write return"),
        ("def interact(messages): ...\nTOOL = 'calc'", "TOOL holds 'c'; give a mapping"),
    ],
)
def test_a_file_that_is_no_environment_is_refused(text, words, tmp_path):
    (tmp_path / "env.py").write_text(text)
    with pytest.raises(ConfigError) as told:
        load_script(str(tmp_path / "env.py"), turns=2)
    assert words in str(told.value)


# ---- in training -----------------------------------------------------------------------------------------------------

WORLD = """
TOOL = {"type": "function", "function": {"name": "count"}}

def interact(messages):
    said = messages[-1]["content"]
    return [] if sum(map(ord, said)) % 3 == 0 else [{"role": "tool", "content": str(len(said))}]

def reward_fn(messages, answer):
    said = [len(m["content"]) for m in messages if m["role"] == "assistant"]
    return sum(said) / 10 + (answer in messages[0]["content"])
"""


@pytest.fixture
def world(tmp_path):
    (tmp_path / "world.py").write_text(WORLD)
    return str(tmp_path / "world.py")


def learner(world, kind=GRPOLearner, *, reward=None, data=None, template=None, algo=None, rollout=None, **training):
    make = GRPOConfig if kind is GRPOLearner else PPOConfig
    model = functools.partial(tiny_model, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    made = cluster(
        actor=model(),
        critic=model(1) if kind is PPOLearner else None,
        tokenizer=tokenizer,
        rollout={
            "env_path": world,
            "max_turns": 3,
            "max_prompt_length": 100,
            "max_episode_tokens": 150,
            "max_tokens_to_generate": 6,
            **(rollout or {}),
        },
        **{"max_steps": 3, **training},
    )
    data = DataConfig(**{"batch_size": 2, "apply_chat_template": True, **(data or {})})
    return kind(made, make(**{"beta": 0.0, "num_generations": 3, **(algo or {})}), reward, data=data)


def batch_of(made, count=2):
    encode = made.encoder(Mode.TRAIN)
    prompts = [encode(row, i) for i, row in enumerate(rows(count, answer=["1"] * count))]
    step = made.reward(made.sample(Step(index=5, prompts=prompts)))
    return step, TokenBatch.from_groups(step.groups)


@pytest.mark.parametrize("template", [None, FORGETFUL.replace(".split('|')[-1]", "[1:]")])
def test_the_trainer_computes_the_logprobs_that_the_sampler_had(world, template):
    made = learner(world, template=template)
    step, batch = batch_of(made)
    assert (batch.num_sequences > 6) == (template is not None) and len(step.rewards.total) == len(batch.group_of) == 6
    at = batch.mask
    assert torch.equal(at, batch.versions >= 0) and (at.sum() < len(at)) == (template is None)
    want = batch.sampler_logprobs[at]
    torch.testing.assert_close(made.cluster.actor.logprobs(batch).logprobs[at], want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(one_by_one(made.cluster.actor.module, batch)[at], want, atol=1e-5, rtol=1e-5)
    for group in step.groups:
        for c in group.completions:
            assert c.info["turns"] == 3 or c.messages[-1]["role"] == "assistant"


def test_rewards_are_of_whole_conversations(world):
    step, _ = batch_of(learner(world))
    want, turns = [], set()
    for group in step.groups:
        for c in group.completions:
            turns.add(c.info["turns"])
            said = sum(len(m["content"]) for m in c.messages if m["role"] == "assistant")
            want.append(said / 10 + ("1" in group.prompt.source))
    assert step.rewards.total.tolist() == pytest.approx(want) and len(turns) > 1


@pytest.mark.parametrize(
    ("kind", "algo"),
    [
        (GRPOLearner, {"dynamic_sampling": True}),
        (GRPOLearner, {"advantage_estimator": "remax", "num_generations": 2}),
        (PPOLearner, {"num_generations": 1}),
    ],
)
def test_a_run_resumes_to_the_bit(world, kind, algo, tmp_path):
    data, rounds = (
        rows(12, answer=["1"] * 12),
        {"eval_every_n_steps": 1, "checkpointing_options": {"save_interval_steps": 1}},
    )
    runs = []
    for name, steps in (("whole", (2,)), ("parts", (1, 2))):
        for last in steps:
            more = {"resume": "latest"} if last != steps[0] else {}
            made = learner(world, kind, algo=algo, max_steps=last, run_dir=str(tmp_path / name), **rounds, **more)
            run = made.train(data, data[:2])
        runs.append((weights_of(made.cluster.actor.module), run.rows))
    (whole, rows_of_whole), (parts, rows_of_parts) = runs
    assert same(whole, parts) and not same(whole, weights_of(tiny_model(max_position_embeddings=512)))
    numbers = lambda found: [{k: v for k, v in r.items() if "time" not in k and "memory" not in k} for r in found]
    assert numbers(rows_of_whole)[-1] == numbers(rows_of_parts)[-1]
    assert {"turns/mean", "turns/forks", "completions/sampled_tokens"} <= rows_of_whole[-1].keys()


def test_the_completions_of_a_run_show_the_turns(world, tmp_path):
    import pandas

    learner(world, max_steps=1, run_dir=str(tmp_path / "run")).train(rows(4, answer=["1"] * 4))
    table = pandas.read_parquet(tmp_path / "run" / "completions" / "train-000001.parquet")
    said = json.loads(table.completion[0])
    assert said[0]["role"] == "assistant" and json.loads(table.loc[0, "info"])["turns"] == (len(said) + 1) // 2
    assert set(table.columns) >= {"reward/reward_fn"}
    starts, ends, versions = table.turn_starts[0], table.turn_ends[0], table.versions[0]
    assert len(starts) == len(ends) == (len(said) + 1) // 2
    assert sorted(i for s, e in zip(starts, ends) for i in range(s, e)) == np.flatnonzero(versions >= 0).tolist()
    waits = [json.loads(text) for text in table.seconds]
    assert all(w["engine"] >= 0 for w in waits) and any("tools" in w for w in waits)


def test_an_episode_whose_world_fails_has_no_reward_and_teaches_nothing(tmp_path):
    import pandas

    (tmp_path / "env.py").write_text(
        WORLD.replace("return [] if", "assert sum(map(ord, said)) % 3 != 1\n    return [] if")
    )
    options = {"on_reward_error": "none", "reward_timeout_s": None, "run_dir": str(tmp_path / "run")}
    made = learner(str(tmp_path / "env.py"), algo={"scale_rewards": "none"}, **options)
    step, _ = batch_of(made, 4)
    failed = torch.tensor([c.finish_reason == "error" for g in step.groups for c in g.completions])
    assert failed.any() and not failed.all() and np.isnan(step.rewards.total).tolist() == failed.tolist()
    scored = made.assign_advantages(made.score(made.batch(step))).batch
    assert (scored.advantages[failed.index_select(0, scored.trajectory)] == 0).all()
    want = []  # a failure is not a zero: the baseline is the mean of the episodes of the group that did not fail
    for totals in step.rewards.total.reshape(4, 3).tolist():
        known = [total for total in totals if not math.isnan(total)]
        want += [0.0 if math.isnan(total) or len(known) < 2 else total - sum(known) / len(known) for total in totals]
    assert any(0 < sum(math.isnan(t) for t in ts) < 2 for ts in step.rewards.total.reshape(4, 3).tolist())
    token_wants = torch.tensor(want).index_select(0, scored.trajectory)[scored.mask]
    torch.testing.assert_close(scored.advantages[scored.mask], token_wants, atol=1e-5, rtol=1e-5)

    for row in made.train(rows(8, answer=["1"] * 8)).rows:
        table = pandas.read_parquet(tmp_path / "run" / "completions" / f"train-{int(row['step']):06d}.parquet")
        assert row["turns/failed"] == (table.finish_reason == "error").sum()


def test_a_world_that_fails_loses_no_finished_step(tmp_path):
    text = WORLD.replace("def interact", "calls = []\n\ndef interact").replace(
        "    said =", "    calls.append(0)\n    assert len(calls) < 30, 'the world has ended'\n    said ="
    )
    (tmp_path / "env.py").write_text(text)
    made = learner(str(tmp_path / "env.py"), max_steps=50, run_dir=str(tmp_path / "run"))
    with pytest.raises(RewardError, match="the world has ended"):
        made.train(rows(24, answer=["1"] * 24))
    done = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    rows_kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert done and int(done[-1].name.split("-")[1]) == len(rows_kept) > 0


def test_whet_eval_takes_an_environments_reward_and_turns(world, tmp_path):
    rollout = f"rollout: {{env_path: {world}, max_turns: 3}}\n"
    recipe = "actor: {model: m}\ndata: {path: d.jsonl, eval_path: e.jsonl}\n" + rollout
    (tmp_path / "run.yaml").write_text(recipe)
    config = load_eval(["--config", str(tmp_path / "run.yaml")])
    check_eval(config)
    assert config.reward == f"{world}:reward_fn" and config.sampling.max_turns == 3


def test_from_python_interact_may_be_a_function():
    answer = lambda messages: [{"role": "tool", "content": "!"}] if len(messages) < 4 else []
    step, _ = batch_of(learner(answer, reward=lambda completions, **_: [float(len(c)) for c in completions]))
    assert step.rewards.total.tolist() == [3.0] * 6  # the model, the world, and the model again


def test_evaluation_has_the_tools_of_its_own_environment(tmp_path):
    for name in ("train", "eval"):
        doc = '"""A tool.\n\n        Args:\n            x: a number.\n        """'
        method = f"    def {name}_tool(self, x: int) -> int:\n        {doc}\n        return x\n"
        (tmp_path / f"{name}.py").write_text(f"class World:\n{method}")
    made = learner(
        f"{tmp_path}/train.py:World",
        template=TOOLS,
        reward=lambda completions, **_: [0.0] * len(completions),
        rollout={"eval": {"env_path": f"{tmp_path}/eval.py:World"}},
    )
    for mode in (Mode.TRAIN, Mode.EVAL):
        (tool,) = made.encoder(mode).template.options["tools"]
        assert tool["function"]["name"] == f"{mode.value}_tool"
