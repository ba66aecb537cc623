import functools
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    END,
    PAD,
    cluster,
    gap,
    grpo_objective,
    length_reward,
    one_by_one,
    prompt,
    rows,
    same,
    tiny_model,
    weights_of,
)
from transformers import BloomConfig, BloomForCausalLM

import whet
from whet.config import DataConfig, GRPOConfig, Mode, OptimConfig, RoleConfig, RolloutConfig
from whet.errors import ConfigError, DataError
from whet.learners.grpo import GRPOLearner
from whet.ops import group_relative
from whet.packing.padded import completion_mask, padded_batch, prompt_mask
from whet.rollout.base import EngineCaps, Output
from whet.rollout.driver import Episode, completion
from whet.rollout.hf import HFEngine
from whet.rollout.mock import MockEngine
from whet.rollout.policy_rollouts import PolicyRollouts
from whet.rollout.queue_engine import QueueEngine
from whet.tunix.metrics_buffer import MetricsBuffer
from whet.types import TokenBatch, TrainExample

PROMPTS = ["1+1=", "what?", "a", "1+1="]


def right_padded(ids, pad=PAD):
    width = max(map(len, ids))
    return torch.tensor([[*row.tolist(), *[pad] * (width - len(row))] for row in ids])


# ---- generate ------------------------------------------------------------------------------------------------------


def test_generate_gives_text_tokens_and_left_padded_prompts():
    c = cluster(rollout={"return_logprobs": True})
    out = c.generate(PROMPTS)
    assert len(out.text) == len(out.tokens) == len(out.logprobs) == 4
    assert out.left_padded_prompt_tokens.shape == (4, 5)
    assert out.left_padded_prompt_tokens[2].tolist() == [PAD] * 4 + [ord("a")]
    for text, tokens, logprobs in zip(out.text, out.tokens, out.logprobs):
        assert 1 <= len(tokens) <= 8 and len(logprobs) == len(tokens) and (logprobs <= 0).all()
        assert text == c.decode(tokens)
    assert out.logits is None
    assert cluster().generate(PROMPTS).logprobs is None  # not asked for


def test_calls_draw_anew_without_a_seed_and_the_same_with_one():
    c = cluster()
    draw = lambda **options: [t.tolist() for t in c.generate(PROMPTS, **options).tokens]
    first, second = draw(), draw()
    assert first != second
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert first[0] != first[3]  # one prompt twice, two places: two draws
    seeded = cluster(rollout={"seed": 5})
    again = [[t.tolist() for t in seeded.generate(PROMPTS).tokens] for _ in range(2)]
    assert again[0] == again[1] == draw(seed=5)
    assert [t.tolist() for t in cluster().generate(PROMPTS).tokens] == first  # another cluster of the same seed


def sampled(c, **options):
    encode = c.encoder()
    prompts = [encode({"prompt": text}, i) for i, text in enumerate(PROMPTS)]
    return [g.completions[0].tokens.tolist() for g in c.sample(prompts, **options)]


def test_training_evaluation_and_calls_share_no_draw():
    c = cluster()
    drawn = [sampled(c, mode=mode, seed=seed) for mode in ("train", "eval", "generate") for seed in range(3)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_rollouts_own_seed_comes_before_the_runs():
    assert sampled(cluster(rollout={"seed": 5}, seed=3)) == sampled(cluster(seed=5)) != sampled(cluster(seed=3))


def test_draws_do_not_depend_on_the_micro_batch_size():
    c = cluster()
    draws = [[t.tolist() for t in c.generate(PROMPTS, micro_batch_size=n, seed=1).tokens] for n in (None, 1, 3, 4)]
    assert draws.count(draws[0]) == 4


def test_max_generation_steps_comes_before_the_configuration():
    out = cluster(rollout={"max_tokens_to_generate": 3}).generate(PROMPTS, max_generation_steps=12, seed=0)
    assert max(map(len, out.tokens)) > 3
    assert max(map(len, cluster().generate(PROMPTS, max_generation_steps=2).tokens)) == 2


def test_each_mode_has_its_own_sampling():
    two = {"train": RolloutConfig(temperature=1.0), "eval": RolloutConfig(temperature=0.0, max_tokens_to_generate=5)}
    c = cluster(rollout={Mode(k): v for k, v in two.items()})
    greedy = [[t.tolist() for t in c.generate(PROMPTS, mode=Mode.EVAL).tokens] for _ in range(2)]
    assert greedy[0] == greedy[1] and max(map(len, greedy[0])) <= 5
    assert c.get_rollout_config(Mode.EVAL).max_tokens_to_generate == 5
    assert c.get_rollout_config().temperature == c.get_rollout_config(mode=Mode.TRAIN).temperature == 1.0


def test_chats_take_the_template_and_texts_do_where_asked():
    c = cluster(rollout={"max_prompt_length": 100})
    chat = c.generate([[{"role": "user", "content": "hi"}]]).left_padded_prompt_tokens
    asked = c.generate(["hi"], apply_chat_template=True).left_padded_prompt_tokens
    assert chat.tolist() == asked.tolist()
    assert "assistant" in c.tokenizer.decode(chat[0])
    assert c.generate(["hi"]).left_padded_prompt_tokens.tolist() == [[104, 105]]


def test_logits_come_back_on_request():
    out = cluster(rollout={"return_logprobs": True}).generate(PROMPTS, return_logits=True)
    for tokens, logits, logprobs in zip(out.tokens, out.logits, out.logprobs):
        assert logits.shape == (len(tokens), 264)
        want = torch.tensor(logits).log_softmax(-1).gather(1, torch.tensor(tokens).long()[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=0)


def test_no_prompts_and_prompts_over_the_limit_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        cluster().generate([])
    with pytest.raises(DataError, match="max_prompt_length"):
        cluster(rollout={"max_prompt_length": 4}).generate(PROMPTS)
    with pytest.raises(DataError, match="longer than max_prompt_length=4"):
        cluster(rollout={"max_prompt_length": 4, "on_long_prompt": "drop"}).generate(PROMPTS)


def test_tags_of_a_call_stand_on_the_timeline(tmp_path):
    c = cluster()
    c.generate(PROMPTS, trace_tags={"role": "probe"})
    c.perf.write(tmp_path / "trace.json")
    assert '"probe"' in (tmp_path / "trace.json").read_text()
    assert c.perf is c.perf_v2


# ---- logprobs ------------------------------------------------------------------------------------------------------


def test_logps_are_those_of_a_plain_forward_of_each_row():
    c = cluster(reference=tiny_model(1), rollout={"temperature": 0.7})
    out = c.generate(PROMPTS)
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    batch, mask = padded_batch(prompts, completions, PAD, [END])
    for verb, seed, temperature in (
        (c.get_actor_per_token_logps, 0, 0.7),
        (c.get_ref_per_token_logps, 1, 0.7),
        (functools.partial(c.get_actor_per_token_logps, temperature=1.0), 0, 1.0),
    ):
        logps = verb(prompt_tokens=prompts, completion_tokens=completions, pad_id=PAD, eos_id=END)
        want = one_by_one(tiny_model(seed), batch, temperature).detach()
        assert logps.shape == completions.shape and logps.dtype == torch.float32
        torch.testing.assert_close(logps[mask], want, atol=1e-4, rtol=1e-5)
        assert (logps[~mask] == 0).all()
        cut = verb(prompts, completions, PAD, END, micro_batch_size=1)
        torch.testing.assert_close(cut, logps, atol=1e-4, rtol=1e-5)
    old = c.get_old_per_token_logps(prompts, completions)
    torch.testing.assert_close(old, c.get_actor_per_token_logps(prompts, completions, PAD, END))
    cut = c.get_old_per_token_logps(prompts, completions, micro_batch_size=2)
    torch.testing.assert_close(cut, old, atol=1e-4, rtol=0)


def test_the_sampler_reports_what_the_trainer_computes():
    c = cluster(rollout={"return_logprobs": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9})
    out = c.generate(PROMPTS)
    logps = c.get_actor_per_token_logps(out.left_padded_prompt_tokens, right_padded(out.tokens), PAD, END)
    for row, sampled in zip(logps, out.logprobs):
        torch.testing.assert_close(row[: len(sampled)], torch.tensor(sampled), atol=1e-4, rtol=0)


def test_the_inference_worker_and_the_values_of_a_critic():
    c = cluster(reference=tiny_model(1), critic=tiny_model(2))
    out = c.generate(PROMPTS)
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    ref = c.inference_worker.get_ref_per_token_logps(prompts, completions, PAD, END)
    assert torch.equal(ref, c.get_ref_per_token_logps(prompts, completions, PAD, END))
    values = c.inference_worker.get_values(prompts, completions, PAD, END)
    assert values.shape == completions.shape and (values == 0).all()  # a new value head


def test_a_reference_that_is_the_actor_stays_what_it_was():
    model = tiny_model()
    c = cluster(model, reference=model)
    out = c.generate(PROMPTS)
    args = (out.left_padded_prompt_tokens, right_padded(out.tokens), PAD, END)
    before = c.get_ref_per_token_logps(*args)
    assert torch.equal(before, c.get_actor_per_token_logps(*args))
    c.update_actor([example(c, out)])
    assert torch.equal(c.get_ref_per_token_logps(*args), before)
    assert not torch.equal(c.get_actor_per_token_logps(*args), before)


def test_roles_that_are_not_there_are_named():
    c = cluster()
    with pytest.raises(ConfigError, match=r"no reference; give RLCluster\(reference="):
        c.get_ref_per_token_logps([[5]], [[6]], PAD, END)
    with pytest.raises(ConfigError, match="no critic"):
        _ = c.critic_trainer
    with pytest.raises(ConfigError, match="no critic"):
        c.update_critic([])


# ---- updates -------------------------------------------------------------------------------------------------------


def example(c, out, advantages=None, **columns):
    """A TrainExample of what generate returned."""
    prompts, completions = torch.tensor(out.left_padded_prompt_tokens), right_padded(out.tokens)
    return TrainExample(
        prompt_ids=prompts,
        prompt_mask=prompt_mask(prompts, c.pad_id),
        completion_ids=completions,
        completion_mask=completion_mask(completions, c.eos_ids),
        advantages=torch.linspace(-1, 1, len(prompts)) if advantages is None else advantages,
        **columns,
    )


def test_update_actor_steps_once_for_each_batch_and_reports_the_evaluation():
    c = cluster()
    out = c.generate(PROMPTS)
    before = weights_of(c.actor.module)
    metrics = c.update_actor([example(c, out)] * 2, [example(c, out)], skip_jit=True)
    assert c.actor_trainer.train_steps == 2
    assert not same(weights_of(c.actor.module), before)
    assert {"loss", "grad_norm", "learning_rate", "eval/loss"} <= metrics.keys()
    assert "eval/loss" not in c.update_actor([example(c, out)])
    with pytest.raises(DataError, match="the data set has no batch, so nothing would be updated"):
        c.update_actor([])


def test_train_micro_batches_are_accumulated_to_one_step_of_the_mini_batch():
    a, b = cluster(mini_batch_size=4, train_micro_batch_size=1, lr=1e-3), cluster(lr=1e-3)
    out = a.generate(PROMPTS, seed=0)
    advantages, parts = torch.linspace(-1, 1, 4), []
    for i in range(4):
        prompts = out.left_padded_prompt_tokens[i : i + 1]
        part = SimpleNamespace(left_padded_prompt_tokens=prompts, tokens=out.tokens[i : i + 1])
        parts.append(example(a, part, advantages[i : i + 1]))
    a.update_actor(parts)
    b.update_actor([example(b, out)])
    assert a.actor_trainer.train_steps == b.actor_trainer.train_steps == 1
    assert gap(weights_of(a.actor.module), weights_of(b.actor.module)) < 1e-5


def test_update_critic_moves_the_values_towards_the_returns():
    c = cluster(critic=tiny_model(2), critic_optimizer=OptimConfig(lr=3e-3))
    out = c.generate(PROMPTS)
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    zeros = torch.zeros(completions.shape)
    data = example(c, out, returns=zeros + 0.1, old_values=zeros)
    losses = [c.update_critic([data])["critic/loss"].value for _ in range(10)]
    assert losses[0] == pytest.approx(0.005)  # half of 0.1 squared
    assert losses[-1] < losses[0] / 2
    assert c.critic_trainer.train_steps == 10
    assert (c.get_values(prompts, completions, PAD, END)[0, 0] > 0).item()


def test_sync_weights_raises_the_version_that_tokens_are_stamped_with():
    c = cluster()
    encoded = [c.encoder()({"prompt": "a"}, 0)]
    assert c.sample(encoded)[0].completions[0].versions.tolist().count(0) > 0
    c.sync_weights()
    c.sync_weights()
    assert set(c.sample(encoded)[0].completions[0].versions.tolist()) == {2}
    assert c.actor.version == 2


def test_the_engine_draws_from_the_updated_weights():
    c = cluster(rollout={"temperature": 0.0})
    out = c.generate(PROMPTS)
    for _ in range(6):
        c.update_actor([example(c, out, -torch.ones(4))])  # away from what it said
    c.sync_weights()
    new = c.generate(PROMPTS)
    assert [t.tolist() for t in new.tokens] != [t.tolist() for t in out.tokens]
    fresh = cluster(c.actor.module, rollout={"temperature": 0.0}).generate(PROMPTS)
    assert [t.tolist() for t in fresh.tokens] == [t.tolist() for t in new.tokens]


class Replay(QueueEngine):
    """An engine that says again what was said before."""

    caps = EngineCaps(shared_weights=True)

    def __init__(self, loaded, decode, outputs=()):
        super().__init__("replay")
        self.outputs, self.closed = outputs, False

    def step(self, timeout_s=None):
        taken = [self.queue.popleft() for _ in range(len(self.queue))]
        return [
            Output(
                id=r.id,
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
                versions=np.zeros(len(tokens), np.int32),
                finish_reason="stop" if tokens[-1] == END else "length",
            )
            for r, tokens in zip(taken, self.outputs)
        ]

    def close(self):
        self.closed = True


def test_an_engine_without_a_method_is_refused_by_its_name():
    class Half(Replay):
        stats = property()

    with pytest.raises(ConfigError, match=r"the engine Half has no stats; .*QueueEngine"):
        cluster(engine=Half).build_engine()


def test_a_grpo_step_written_from_the_verbs_is_the_first_step_of_the_learner():
    data, group = [r["prompt"] for r in rows(4)], 4
    by_hand = cluster(reference=tiny_model(1), rollout={"temperature": 0.9})
    out = by_hand.generate([p for p in data for _ in range(group)], seed=7)
    rewards = torch.tensor(length_reward(out.text))
    advantages = group_relative(rewards, torch.arange(4).repeat_interleave(group))
    assert (advantages != 0).any()
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    ref = by_hand.get_ref_per_token_logps(prompts, completions, by_hand.pad_id, by_hand.eos_ids)
    by_hand.actor_trainer.with_loss_fn(
        functools.partial(grpo_objective, beta=0.04, kl_mode="low_var_kl"), loss_agg_mode="sequence-mean-token-mean"
    )
    by_hand.update_actor([example(by_hand, out, advantages, ref_per_token_logps=ref)])
    by_hand.sync_weights()

    engine = functools.partial(Replay, outputs=out.tokens)
    c = cluster(reference=tiny_model(1), rollout={"temperature": 0.9}, engine=engine, max_steps=1)
    learner = GRPOLearner(
        c, GRPOConfig(num_generations=group, beta=0.04), length_reward, data=DataConfig(batch_size=4, shuffle=False)
    )
    learner.train(rows(4))
    assert not same(weights_of(c.actor.module), weights_of(tiny_model()))
    assert gap(weights_of(by_hand.actor.module), weights_of(c.actor.module)) < 1e-6
    assert by_hand.actor.version == c.actor.version == 1


# ---- engines -------------------------------------------------------------------------------------------------------


class Echo:
    """A rollout class with Tunix's methods."""

    made = ()

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, text="ok"):
        self.model_, self.tokenizer, self.text, self.config = rollout_actor, tokenizer, text, rollout_config
        self.params = 0

    def generate(self, prompts, rollout_config, **kwargs):
        tokens = [np.array([*self.tokenizer(self.text).input_ids, END]) for _ in prompts]
        return SimpleNamespace(
            text=[self.text] * len(prompts), tokens=tokens, logprobs=None, left_padded_prompt_tokens=None, logits=None
        )

    def update_params(self, params, filter_types=None):
        self.params = len(list(params))

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        raise NotImplementedError

    def pad_id(self):
        return PAD

    def eos_id(self):
        return END

    def model(self):
        return self.model_


@pytest.mark.parametrize(
    "engine",
    ["embedded", "hf", HFEngine, functools.partial(HFEngine), "whet.rollout.hf:HFEngine"],
    ids=["embedded", "hf", "class", "partial", "reference"],
)
def test_the_engine_is_a_name_a_class_a_partial_or_a_reference(engine):
    c = cluster(engine=engine)
    assert len(c.generate(PROMPTS).text) == 4
    before = [t.tolist() for t in cluster().generate(PROMPTS, seed=1).tokens]
    assert [t.tolist() for t in c.generate(PROMPTS, seed=1).tokens] == before  # every engine draws alike


@pytest.mark.parametrize("engine", [Echo, functools.partial(Echo, text="yes")], ids=["class", "partial"])
def test_a_class_with_tunixs_rollout_methods_is_an_engine(engine):
    c = cluster(engine=engine)
    want = "yes" if isinstance(engine, functools.partial) else "ok"
    out = c.generate(PROMPTS)
    assert out.text == [want] * 4 and [t.tolist()[-1] for t in out.tokens] == [END] * 4
    run = GRPOLearner(c, GRPOConfig(beta=0.0), length_reward, data=DataConfig(batch_size=2)).train(rows(2))
    assert run.step == 1


def test_an_unknown_engine_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean embedded"):
        cluster(engine="embeded")


def test_a_model_that_cannot_be_packed_trains_with_the_hf_engine():
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=264, hidden_size=32, n_head=4, n_layer=2, eos_token_id=END))
    c = cluster(model, rollout={"max_tokens_to_generate": 4})
    assert not c.actor.loaded.packable and isinstance(c.rollout, HFEngine)
    before = weights_of(model)
    algo = GRPOConfig(num_generations=4, beta=0.0)
    run = GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(4))
    assert run.step == 2 and not same(weights_of(model), before)


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_buffered_metrics_are_reduced_in_the_row_of_their_step_and_given_to_the_external_logger():
    seen = []
    c = cluster().with_external_metrics_logger(lambda buffer: seen.append(buffer))
    c.global_steps = 1
    c.buffer_metrics({"mine": (1.0, np.mean), "note": ("hello", None)})
    c.buffer_metrics({"mine": (3.0, np.mean)}, mode=Mode.TRAIN)
    c.buffer_metrics_async({"later": (5.0, np.max)}, Mode.TRAIN, step=2)
    c.buffer_metrics({"other": (7.0, np.mean)}, mode=Mode.EVAL)
    assert c.take_metrics(1, Mode.TRAIN) == {"mine": 2.0}
    assert c.take_metrics(2, Mode.TRAIN) == {"later": 5.0}
    assert c.take_metrics(2, Mode.EVAL) == {"other": 7.0}
    assert [(b.global_steps, b.mode) for b in seen] == [(1, "train"), (2, "train"), (1, "eval")]
    assert isinstance(seen[0], MetricsBuffer) and seen[0].metrics["note"][0] == ["hello"]


def test_metrics_buffered_by_a_reward_function_stand_in_the_row():
    c = cluster()

    def reward(completions, **_):
        c.buffer_metrics({"mine": (float(len(completions)), np.sum)})
        return length_reward(completions)

    run = GRPOLearner(c, GRPOConfig(beta=0.0), reward, data=DataConfig(batch_size=2)).train(rows(4))
    assert [row["mine"] for row in run.rows] == [4.0, 4.0]


# ---- construction and end ------------------------------------------------------------------------------------------


def test_models_are_read_from_folders_with_their_own_optimizer_and_dtype(model_folder):
    c = cluster(RoleConfig(model=model_folder, dtype="bfloat16"), reference=model_folder, tokenizer=model_folder)
    assert c.dtypes["actor"] == "bfloat16"
    assert c.actor.optim.masters["model.norm.weight"].dtype == torch.float32
    assert len(c.generate(PROMPTS).text) == 4


def test_what_this_release_does_not_have_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="can't be the reward model: it has no score head"):
        whet.RLCluster(actor=tiny_model(), reward=tiny_model(), tokenizer="byte", cluster_config=whet.ClusterConfig())
    with pytest.raises(ConfigError, match=r"actor\.model is not set"):
        cluster(RoleConfig())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        cluster()


def test_close_ends_the_engine_and_frees_the_optimizers():
    c = cluster(engine=Replay)
    c.build_engine()
    c.close()
    assert c.rollout.closed and c.actor.optim is None


def use_like_tunix():
    """Tunix's classes by their names, from models to a trained policy."""
    model, tokenizer = tiny_model(), "byte"
    rl_cluster = whet.RLCluster(
        actor=model,
        reference=model,
        tokenizer=tokenizer,
        cluster_config=whet.ClusterConfig(
            role_to_mesh=None,
            rollout_engine="embedded",
            training_config=whet.RLTrainingConfig(
                actor_optimizer=whet.OptimConfig(lr=1e-2),
                eval_every_n_steps=2,
                max_steps=2,
                mini_batch_size=2,
            ),
            rollout_config=whet.RolloutConfig(max_tokens_to_generate=8, temperature=0.9, max_prompt_length=32),
        ),
    )
    learner = whet.GRPOLearner(
        rl_cluster, algo_config=whet.GRPOConfig(num_generations=4, beta=0.04), reward_fns=[length_reward]
    )
    batches = [{"prompts": ["1+1=", "2+2="], "answer": [2, 4]}, {"prompts": ["3=", "4="], "answer": [3, 4]}]
    return learner.train(batches, batches[:1])


def test_a_script_in_tunixs_words_trains_in_under_25_lines():
    lines = [line for line in inspect.getsource(use_like_tunix).splitlines() if line.strip()]
    assert len(lines) < 25
    run = use_like_tunix()
    assert run.step == 2 and run.rows[-1]["mode"] == "eval"
    assert not same(weights_of(run.trainer.worker.module), weights_of(tiny_model()))


# ---- options of transformers' generate -------------------------------------------------------------------------------


def test_beams_in_evaluation_leave_draws_in_training(caplog):
    rollout = {
        "return_logprobs": True,
        "eval": {"generation_kwargs": {"num_beams": 3}, "temperature": 0.0, "return_logprobs": True},
    }
    c = cluster(rollout=rollout)
    assert type(c.rollout).__name__ == "HFEngine" and "generation_kwargs (num_beams)" in caplog.text
    greedy = cluster(rollout={"temperature": 0.0, "return_logprobs": True}).generate(PROMPTS)
    beams = c.generate(PROMPTS, mode=Mode.EVAL)
    assert sum(map(sum, beams.logprobs)) > sum(map(sum, greedy.logprobs))
    assert [t.tolist() for t in c.generate(PROMPTS, seed=1).tokens] != [t.tolist() for t in beams.tokens]


def test_draws_under_options_agree_with_the_trainer_under_full_support():
    c = cluster(rollout={"generation_kwargs": {"no_repeat_ngram_size": 1}, "logprob_support": "full"})
    groups = c.sample([prompt("2+2="), prompt("7-1=", 1)], num_generations=3)
    tokens = [x.tokens.tolist() for g in groups for x in g.completions]
    assert all(len(set(t)) == len(t) for t in tokens)
    batch = TokenBatch.from_groups(groups, [0.0] * 6)
    assert (c.actor.logprobs(batch).logprobs - batch.sampler_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_beams": 2}, "num_beams=2 searches"), ({"top_h": 0.4}, "does not know the distribution")],
)
def test_a_learner_refuses_options_that_the_trainer_can_not_follow(options, words):
    with pytest.raises(ConfigError, match=words):
        GRPOLearner(cluster(rollout={"generation_kwargs": options}), GRPOConfig(beta=0.0), [length_reward])


def test_a_resting_engine_holds_no_memory_and_samples_again_after_the_sync():
    c = cluster()
    draw = lambda: [x.tokens.tolist() for x in c.sample([prompt("abc")], num_generations=2, step=1)[0].completions]
    want = draw()
    assert c.rollout.stats().kv_bytes > 0
    c.release_engine_memory()
    assert c.rollout.stats().kv_bytes == 0
    c.sync_weights()
    assert draw() == want


def test_an_engine_rests_once_and_wakes_for_who_samples_before_the_sync(monkeypatch):
    c, trims = cluster(), []
    freed = lambda: trims.append(c.rollout.stats().kv_bytes)
    monkeypatch.setattr("whet.train.role_workers.release_freed_memory", freed)
    want = [t.tolist() for t in c.generate(PROMPTS, seed=1).tokens]
    c.release_engine_memory()
    c.release_engine_memory()  # the next mini-batch
    assert trims == [0]
    assert [t.tolist() for t in c.generate(PROMPTS, seed=1).tokens] == want
    assert c.rollout.stats().kv_bytes > 0
    c.release_engine_memory()
    assert trims == [0, 0]


class Sleeper(MockEngine):
    """An engine that notes when it sleeps, wakes and takes weights."""

    def __init__(self, log, **caps):
        super().__init__(vocabulary=8)
        self.caps, self.log = EngineCaps(sleep=True, **caps), log

    def sleep(self):
        self.log.append("sleep")

    def wake(self):
        self.log.append("wake")

    def update(self, version, weights=None):
        self.log.append(("update", weights is not None))


@pytest.mark.parametrize(
    ("place", "shared", "rests"),
    [("cpu", True, True), ("cuda", True, True), ("cuda", False, True), ("cpu", False, False)],
)
def test_an_engine_rests_where_that_makes_room_and_freed_memory_leaves_then(place, shared, rests, monkeypatch):
    c, log = cluster(), []
    monkeypatch.setattr("whet.train.role_workers.empty_cache", lambda device: log.append(f"empty {device}"))
    engine = Sleeper(log, shared_weights=shared)
    policy = SimpleNamespace(version=0, device=torch.device(place), named_weights=c.actor.named_weights)
    c._rollouts = PolicyRollouts(lambda: engine, policy)
    assert c.rollout is engine
    for _ in range(2):  # two mini-batches
        c.release_engine_memory()
    c.sample([])
    c.sample([])
    between = [("update", False)] if shared else []
    assert log == (["sleep", "empty cpu", "wake", *between] if rests else [])
    log.clear()
    c.release_engine_memory()
    c.sync_weights()
    woken = ["wake"] if rests else []
    assert log == [*(["sleep", "empty cpu"] if rests else []), "empty cpu", *woken, ("update", not shared)]


def test_what_loading_left_is_given_back_before_the_engine_looks_for_memory(monkeypatch):
    log = []
    monkeypatch.setattr("whet.train.role_workers.empty_cache", lambda device: log.append("empty"))
    make = whet.cluster.make_engine
    monkeypatch.setattr("whet.cluster.make_engine", lambda *a, **o: (log.append("engine"), make(*a, **o))[1])
    c = cluster()
    assert log == ["empty"] and c.rollout is c.rollout
    assert log == ["empty", "engine"]


def test_a_default_token_budget_that_grows_is_logged_once(caplog):
    long = {"max_prompt_length": 2000, "max_tokens_to_generate": 100}
    with caplog.at_level("INFO", "whet"):
        made = cluster(tiny_model(max_position_embeddings=4096), reference=tiny_model(1), rollout=long)
        given = cluster(max_tokens_per_microbatch=200)
        cluster()
    assert [w.saturating_tokens for w in (*made.workers.values(), given.actor)] == [1536, 1536, None]
    assert [w.max_tokens for w in made.workers.values()] == [2176, 2176]
    grown = [r.message for r in caplog.records if "max_tokens_per_microbatch" in r.message]
    assert len(grown) == 1 and "from the default 2048 to 2176" in grown[0]


def test_the_token_budget_of_a_limit_beyond_the_models_positions_stays_the_default():
    made = cluster(reference=tiny_model(1, max_position_embeddings=64), rollout={"max_prompt_length": 10**7})
    assert [w.max_tokens for w in made.workers.values()] == [2048, 2048]


def expecting(c):
    """Notes what each request of a cluster's engine expects."""
    seen, submit = [], c.rollout.submit
    c.rollout.submit = lambda requests: seen.append([r.expected for r in requests]) or submit(requests)
    return seen


def test_a_row_drawn_again_expects_the_longest_completion_that_it_had():
    stops = {"eos_tokens": list(range(60))}  # a random model draws one soon
    c, prompts = cluster(rollout=stops), [prompt([5, 6], row=3), prompt([7], row=9)]
    seen = expecting(c)
    groups = c.sample(prompts, num_generations=2)
    longest = [max(len(x.tokens) for x in g.completions) for g in groups]
    assert longest[0] != longest[1]
    c.sample(prompts[::-1], num_generations=2, step=1, mode=Mode.EVAL)  # whose lengths are others
    again = c.sample(prompts[::-1], num_generations=2, step=1)
    assert seen == [[None] * 4, [None] * 4, [longest[1]] * 2 + [longest[0]] * 2]
    resumed = cluster(rollout=stops)
    resumed.restore(c.state(), 2)
    seen = expecting(resumed)
    resumed.sample(prompts, num_generations=1, step=2)
    assert seen == [[max(len(x.tokens) for x in g.completions) for g in again[::-1]]]


def test_direct_calls_leave_no_lengths_behind():
    c = cluster()
    c.generate(PROMPTS)
    assert c.state()["lengths"] == {}


# ---- the engine, when it is asked for ------------------------------------------------------------------------------


def no_engine(*args, **options):
    raise AssertionError("an engine was built")


def test_a_cluster_that_only_trains_builds_no_engine(monkeypatch):
    groups = cluster().sample([prompt("2+2=")], num_generations=2)
    batch = TokenBatch.from_groups(groups, [0.0, 1.0]).replace(advantages=torch.ones(sum_tokens(groups)))
    monkeypatch.setattr("whet.cluster.make_engine", no_engine)
    c = cluster()
    c.actor.logprobs(batch)
    c.release_engine_memory()
    c.actor_trainer.update(c.actor_trainer.weighted(batch))
    c.sync_weights()
    assert c.actor.version == 1 and "rollout" not in c.describe()
    state = c.state()
    c.restore(state, 1)
    assert c.state().keys() == state.keys() == {"next_id", "calls", "dtypes", "lengths"}
    c.close()


def sum_tokens(groups):
    return sum(len(x.tokens) for g in groups for x in g.completions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rollout": {"stop": ["<|im_end|>"]}}, "special token"),
        ({"rollout": {"constraint": {"regex": "("}}}, "is refused"),
        ({"engine": "vllmm"}, "did you mean vllm"),
    ],
)
def test_what_is_wrong_with_the_sampling_is_said_before_an_engine_is_built(options, words, monkeypatch):
    monkeypatch.setattr("whet.cluster.make_engine", no_engine)
    with pytest.raises(ConfigError, match=words):
        cluster(**options)


def test_a_learner_builds_the_engine_so_that_what_it_refuses_is_said_before_the_first_step():
    class Half(Replay):
        stats = property()

    with pytest.raises(ConfigError, match="the engine Half has no stats"):
        GRPOLearner(cluster(engine=Half), GRPOConfig(beta=0.0), length_reward)


def test_an_engine_that_is_built_late_draws_what_one_built_at_once_draws():
    early, late = cluster(), cluster()
    early.build_engine()
    drawn = []
    for c in (early, late):
        c.sync_weights()
        c.sync_weights()
        (group,) = c.sample([prompt("2+2=")], num_generations=3, step=4)
        drawn.append([x.tokens.tolist() for x in group.completions])
        assert {v for x in group.completions for v in x.versions.tolist()} == {2}
    assert drawn[0] == drawn[1]


def test_an_engine_with_weights_of_its_own_that_is_built_late_gets_those_of_now():
    log, c = [], cluster()
    policy = SimpleNamespace(version=3, device=torch.device("cpu"), named_weights=c.actor.named_weights)
    c._rollouts = PolicyRollouts(lambda: Sleeper(log, shared_weights=False), policy)
    c.build_engine()
    assert log == [("update", True)]


def test_episodes_of_a_cluster_go_on_after_a_release_and_beside_its_samples():
    c = cluster(rollout={"temperature": 1.0})

    def play(episode):
        first = yield episode.request(episode.prompt.tokens, c.sampling())
        context = np.concatenate([episode.prompt.tokens, first.tokens, [65, 66]]).astype(np.int32)
        second = yield episode.request(context, c.sampling())
        return completion(first, np.array([65, 66]), second, generation=episode.generation)

    episodes = lambda: [Episode(prompt("2+2="), (0, 1, 0, g), play) for g in range(2)]
    want = [x.tokens.tolist() for x in c.rollouts.run(episodes())[0].completions]
    c.release_engine_memory()
    rollouts = c.rollouts
    rollouts.start(episodes())
    (other,) = c.sample([prompt("abc")], step=9)
    alone = cluster(rollout={"temperature": 1.0}).sample([prompt("abc")], step=9)
    assert other.completions[0].tokens.tolist() == alone[0].completions[0].tokens.tolist()
    done = rollouts.ready()
    assert [x.tokens.tolist() for g in done for x in g.completions] == want
    batch = TokenBatch.from_groups(done, [0.0, 1.0])
    gaps = (c.actor.logprobs(batch).logprobs - batch.sampler_logprobs)[batch.mask]
    assert (~batch.mask).sum() == 4 and gaps.abs().max() < 1e-4


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_cannot_draw_in_evaluation_is_refused_when_it_is_built(monkeypatch, engine):
    monkeypatch.setattr(f"whet.rollout.{engine}.imported", lambda: None)  # all that comes before the check
    wrong = {"vllm": {"temperature": 3.0}, "sglang": {"repetition_penalty": 1.5}}[engine]
    modes = {Mode.TRAIN: RolloutConfig(), Mode.EVAL: RolloutConfig(**wrong)}
    with pytest.raises(ConfigError, match=rf"{engine}.*(temperatures of 0|counts tokens)"):
        cluster(engine=engine, rollout=modes).build_engine()
