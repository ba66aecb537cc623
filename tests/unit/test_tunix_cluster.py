"""The methods of Tunix's cluster: text and padded arrays in, padded arrays out."""

import functools
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    END,
    PAD,
    Replay,
    gap,
    grpo_objective,
    length_reward,
    one_by_one,
    rows,
    same,
    tiny_model,
    tunix_cluster,
    weights_of,
)

from whet import tunix
from whet.config import DataConfig, GRPOConfig, Mode, OptimConfig
from whet.errors import ConfigError, DataError
from whet.ops import grpo_advantages
from whet.rollout.base import Request, Sampling
from whet.tunix import GRPOLearner, MetricsBuffer, RolloutConfig, TrainExample
from whet.tunix.base_rollout import BaseRolloutAdapter, prompt_text
from whet.tunix.padded import completion_mask, padded_batch, prompt_mask

PROMPTS = ["1+1=", "what?", "a", "1+1="]


def right_padded(ids, pad=PAD):
    width = max(map(len, ids))
    return torch.tensor([[*row.tolist(), *[pad] * (width - len(row))] for row in ids])


def test_generate_gives_text_tokens_and_left_padded_prompts():
    c = tunix_cluster(rollout={"return_logprobs": True})
    out = c.generate(PROMPTS)
    assert len(out.text) == len(out.tokens) == len(out.logprobs) == 4
    assert out.left_padded_prompt_tokens.shape == (4, 5)
    assert out.left_padded_prompt_tokens[2].tolist() == [PAD] * 4 + [ord("a")]
    for text, tokens, logprobs in zip(out.text, out.tokens, out.logprobs):
        assert 1 <= len(tokens) <= 8 and len(logprobs) == len(tokens) and (logprobs <= 0).all()
        assert text == c.decode(tokens)
    assert out.logits is None
    assert tunix_cluster().generate(PROMPTS).logprobs is None  # not asked for


def test_calls_draw_anew_without_a_seed_and_the_same_with_one():
    c = tunix_cluster()
    draw = lambda **options: [t.tolist() for t in c.generate(PROMPTS, **options).tokens]
    first, second = draw(), draw()
    assert first != second
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert first[0] != first[3]  # one prompt twice, two places: two draws
    seeded = tunix_cluster(rollout={"seed": 5})
    again = [[t.tolist() for t in seeded.generate(PROMPTS).tokens] for _ in range(2)]
    assert again[0] == again[1] == draw(seed=5)
    assert [t.tolist() for t in tunix_cluster().generate(PROMPTS).tokens] == first  # another cluster of the same seed


def test_draws_do_not_depend_on_the_micro_batch_size():
    c = tunix_cluster()
    draws = [[t.tolist() for t in c.generate(PROMPTS, micro_batch_size=n, seed=1).tokens] for n in (None, 1, 3, 4)]
    assert draws.count(draws[0]) == 4


def test_max_generation_steps_comes_before_the_configuration():
    out = tunix_cluster(rollout={"max_tokens_to_generate": 3}).generate(PROMPTS, max_generation_steps=12, seed=0)
    assert max(map(len, out.tokens)) > 3
    assert max(map(len, tunix_cluster().generate(PROMPTS, max_generation_steps=2).tokens)) == 2


def test_each_mode_has_its_own_sampling():
    two = {"train": RolloutConfig(temperature=1.0), "eval": RolloutConfig(temperature=0.0, max_tokens_to_generate=5)}
    c = tunix_cluster(rollout={Mode(k): v for k, v in two.items()})
    greedy = [[t.tolist() for t in c.generate(PROMPTS, mode=Mode.EVAL).tokens] for _ in range(2)]
    assert greedy[0] == greedy[1] and max(map(len, greedy[0])) <= 5
    assert c.get_rollout_config(Mode.EVAL).max_tokens_to_generate == 5
    assert c.get_rollout_config().temperature == c.get_rollout_config(mode=Mode.TRAIN).temperature == 1.0


def test_chats_take_the_template_and_texts_do_where_asked():
    c = tunix_cluster(rollout={"max_prompt_length": 100})
    chat = c.generate([[{"role": "user", "content": "hi"}]]).left_padded_prompt_tokens
    asked = c.generate(["hi"], apply_chat_template=True).left_padded_prompt_tokens
    assert chat.tolist() == asked.tolist()
    assert "assistant" in c.tokenizer.decode(chat[0])
    assert c.generate(["hi"]).left_padded_prompt_tokens.tolist() == [[104, 105]]


def test_logits_come_back_on_request():
    out = tunix_cluster(rollout={"return_logprobs": True}).generate(PROMPTS, return_logits=True)
    for tokens, logits, logprobs in zip(out.tokens, out.logits, out.logprobs):
        assert logits.shape == (len(tokens), 264)
        want = torch.tensor(logits).log_softmax(-1).gather(1, torch.tensor(tokens).long()[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=0)


def test_no_prompts_and_prompts_over_the_limit_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        tunix_cluster().generate([])
    with pytest.raises(DataError, match="max_prompt_length"):
        tunix_cluster(rollout={"max_prompt_length": 4}).generate(PROMPTS)
    with pytest.raises(DataError, match="longer than max_prompt_length=4"):
        tunix_cluster(rollout={"max_prompt_length": 4, "on_long_prompt": "drop"}).generate(PROMPTS)


def test_tags_of_a_call_stand_on_the_timeline(tmp_path):
    c = tunix_cluster()
    c.generate(PROMPTS, trace_tags={"role": "probe"})
    c.perf.write(tmp_path / "trace.json")
    assert '"probe"' in (tmp_path / "trace.json").read_text()
    assert c.perf is c.perf_v2


def test_logps_are_those_of_a_plain_forward_of_each_row():
    c = tunix_cluster(reference=tiny_model(1), rollout={"temperature": 0.7})
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
    c = tunix_cluster(rollout={"return_logprobs": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9})
    out = c.generate(PROMPTS)
    logps = c.get_actor_per_token_logps(out.left_padded_prompt_tokens, right_padded(out.tokens), PAD, END)
    for row, sampled in zip(logps, out.logprobs):
        torch.testing.assert_close(row[: len(sampled)], torch.tensor(sampled), atol=1e-4, rtol=0)


def test_the_inference_worker_and_the_values_of_a_critic():
    c = tunix_cluster(reference=tiny_model(1), critic=tiny_model(2))
    out = c.generate(PROMPTS)
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    ref = c.inference_worker.get_ref_per_token_logps(prompts, completions, PAD, END)
    assert torch.equal(ref, c.get_ref_per_token_logps(prompts, completions, PAD, END))
    values = c.inference_worker.get_values(prompts, completions, PAD, END)
    assert values.shape == completions.shape and (values == 0).all()  # a new value head


def test_a_reference_that_is_the_actor_stays_what_it_was():
    model = tiny_model()
    c = tunix_cluster(model, reference=model)
    out = c.generate(PROMPTS)
    args = (out.left_padded_prompt_tokens, right_padded(out.tokens), PAD, END)
    before = c.get_ref_per_token_logps(*args)
    assert torch.equal(before, c.get_actor_per_token_logps(*args))
    c.update_actor([example(c, out)])
    assert torch.equal(c.get_ref_per_token_logps(*args), before)
    assert not torch.equal(c.get_actor_per_token_logps(*args), before)


def test_roles_that_are_not_there_are_named():
    c = tunix_cluster()
    with pytest.raises(ConfigError, match=r"no reference; give RLEngine\(reference="):
        c.get_ref_per_token_logps([[5]], [[6]], PAD, END)
    with pytest.raises(ConfigError, match="no critic"):
        _ = c.critic_trainer
    with pytest.raises(ConfigError, match="no critic"):
        c.update_critic([])


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
    c = tunix_cluster()
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
    a, b = tunix_cluster(mini_batch_size=4, train_micro_batch_size=1, lr=1e-3), tunix_cluster(lr=1e-3)
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
    c = tunix_cluster(critic=tiny_model(2), critic_optimizer=OptimConfig(lr=3e-3))
    out = c.generate(PROMPTS)
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    zeros = torch.zeros(completions.shape)
    data = example(c, out, returns=zeros + 0.1, old_values=zeros)
    losses = [c.update_critic([data])["critic/loss"].value for _ in range(10)]
    assert losses[0] == pytest.approx(0.005)  # half of 0.1 squared
    assert losses[-1] < losses[0] / 2
    assert c.critic_trainer.train_steps == 10
    assert (c.get_values(prompts, completions, PAD, END)[0, 0] > 0).item()


def test_the_engine_draws_from_the_updated_weights():
    c = tunix_cluster(rollout={"temperature": 0.0})
    out = c.generate(PROMPTS)
    for _ in range(6):
        c.update_actor([example(c, out, -torch.ones(4))])  # away from what it said
    c.sync_weights()
    new = c.generate(PROMPTS)
    assert [t.tolist() for t in new.tokens] != [t.tolist() for t in out.tokens]
    fresh = tunix_cluster(c.actor.module, rollout={"temperature": 0.0}).generate(PROMPTS)
    assert [t.tolist() for t in fresh.tokens] == [t.tolist() for t in new.tokens]


def test_a_grpo_step_written_from_the_verbs_is_the_first_step_of_the_learner():
    data, group = [r["prompt"] for r in rows(4)], 4
    by_hand = tunix_cluster(reference=tiny_model(1), rollout={"temperature": 0.9})
    out = by_hand.generate([p for p in data for _ in range(group)], seed=7)
    rewards = torch.tensor(length_reward(out.text))
    advantages = grpo_advantages(rewards, torch.arange(4).repeat_interleave(group))
    assert (advantages != 0).any()
    prompts, completions = out.left_padded_prompt_tokens, right_padded(out.tokens)
    ref = by_hand.get_ref_per_token_logps(prompts, completions, by_hand.pad_id, by_hand.eos_ids)
    by_hand.actor_trainer.with_loss_fn(
        functools.partial(grpo_objective, beta=0.04, kl_mode="low_var_kl"), loss_agg_mode="sequence-mean-token-mean"
    )
    by_hand.update_actor([example(by_hand, out, advantages, ref_per_token_logps=ref)])
    by_hand.sync_weights()

    engine = functools.partial(Replay, outputs=out.tokens)
    c = tunix_cluster(reference=tiny_model(1), rollout={"temperature": 0.9}, engine=engine, max_steps=1)
    learner = GRPOLearner(
        c, GRPOConfig(num_generations=group, beta=0.04), length_reward, data=DataConfig(batch_size=4, shuffle=False)
    )
    learner.train(rows(4))
    assert not same(weights_of(c.actor.module), weights_of(tiny_model()))
    assert gap(weights_of(by_hand.actor.module), weights_of(c.actor.module)) < 1e-6
    assert by_hand.actor.version == c.actor.version == 1


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


@pytest.mark.parametrize("engine", [Echo, functools.partial(Echo, text="yes")], ids=["class", "partial"])
def test_a_class_with_tunixs_rollout_methods_is_an_engine(engine):
    c = tunix_cluster(engine=engine)
    want = "yes" if isinstance(engine, functools.partial) else "ok"
    out = c.generate(PROMPTS)
    assert out.text == [want] * 4 and [t.tolist()[-1] for t in out.tokens] == [END] * 4
    run = GRPOLearner(c, GRPOConfig(beta=0.0), length_reward, data=DataConfig(batch_size=2)).train(rows(2))
    assert run.step == 1


def test_buffered_metrics_are_reduced_in_the_row_of_their_step_and_given_to_the_external_logger():
    seen = []
    c = tunix_cluster().with_external_metrics_logger(lambda buffer: seen.append(buffer))
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
    c = tunix_cluster()

    def reward(completions, **_):
        c.buffer_metrics({"mine": (float(len(completions)), np.sum)})
        return length_reward(completions)

    run = GRPOLearner(c, GRPOConfig(beta=0.0), reward, data=DataConfig(batch_size=2)).train(rows(4))
    assert [row["mine"] for row in run.rows] == [4.0, 4.0]


def use_like_tunix():
    """Tunix's classes by their names, from models to a trained policy."""
    model, tokenizer = tiny_model(), "byte"
    rl_cluster = tunix.RLCluster(
        actor=model,
        reference=model,
        tokenizer=tokenizer,
        cluster_config=tunix.ClusterConfig(
            role_to_mesh=None,
            rollout_engine="embedded",
            training_config=tunix.RLTrainingConfig(
                actor_optimizer=tunix.OptimConfig(lr=1e-2),
                eval_every_n_steps=2,
                max_steps=2,
                mini_batch_size=2,
            ),
            rollout_config=tunix.RolloutConfig(max_tokens_to_generate=8, temperature=0.9, max_prompt_length=32),
        ),
    )
    learner = tunix.GRPOLearner(
        rl_cluster, algo_config=tunix.GRPOConfig(num_generations=4, beta=0.04), reward_fns=[length_reward]
    )
    batches = [{"prompts": ["1+1=", "2+2="], "answer": [2, 4]}, {"prompts": ["3=", "4="], "answer": [3, 4]}]
    return learner.train(batches, batches[:1])


def test_a_script_in_tunixs_words_trains_in_under_25_lines():
    lines = [line for line in inspect.getsource(use_like_tunix).splitlines() if line.strip()]
    assert len(lines) < 25
    run = use_like_tunix()
    assert run.step == 2 and run.rows[-1]["mode"] == "eval"
    assert not same(weights_of(run.trainer.worker.module), weights_of(tiny_model()))


def test_beams_in_evaluation_leave_draws_in_training(caplog):
    rollout = {
        "return_logprobs": True,
        "eval": {"generation_kwargs": {"num_beams": 3}, "temperature": 0.0, "return_logprobs": True},
    }
    c = tunix_cluster(rollout=rollout)
    assert type(c.rollout.engine).__name__ == "HFEngine" and "generation_kwargs (num_beams)" in caplog.text
    greedy = tunix_cluster(rollout={"temperature": 0.0, "return_logprobs": True}).generate(PROMPTS)
    beams = c.generate(PROMPTS, mode=Mode.EVAL)
    assert sum(map(sum, beams.logprobs)) > sum(map(sum, greedy.logprobs))
    assert [t.tolist() for t in c.generate(PROMPTS, seed=1).tokens] != [t.tolist() for t in beams.tokens]


def test_direct_calls_leave_no_lengths_behind():
    c = tunix_cluster()
    c.generate(PROMPTS)
    assert c.state()["lengths"] == {}


# ---- rollout classes -------------------------------------------------------------------------------------------------


def test_a_tunix_rollout_is_told_what_the_sampling_says():
    told = []

    def generate(prompts, rollout_config):
        told.append((rollout_config.min_p, rollout_config.forbidden_tokens))
        return SimpleNamespace(text=["a"], tokens=[np.array([98])], logprobs=None, left_padded_prompt_tokens=None)

    engine = BaseRolloutAdapter(SimpleNamespace(generate=generate), decode=str, rollout_config=RolloutConfig())
    r = Request(
        id=0, tokens=np.array([5]), sampling=Sampling(min_p=0.2, forbidden_ids=(97,)), group=0, rng_key=(0, 0, 0, 0)
    )
    engine.submit([r])
    engine.step()
    assert told == [(0.2, (97,))]


class Asked:
    """A rollout class of Tunix's kind that notes its prompts."""

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config):
        self.prompts = []

    def generate(self, prompts, rollout_config):
        self.prompts += prompts
        tokens = [np.array([104, 105, END])] * len(prompts)
        return SimpleNamespace(text=[], tokens=tokens, logprobs=None, left_padded_prompt_tokens=None)


def test_a_tunix_rollout_is_given_a_chat_with_its_special_tokens():
    c = tunix_cluster(engine=Asked, rollout={"max_prompt_length": 100})
    chat = [{"role": "user", "content": "é\n ,"}]
    out = c.generate([chat])
    assert c.rollout.rollout.prompts == [
        c.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ]
    assert c.rollout.rollout.prompts[0].startswith("<|im_start|>user") and out.text == ["hi"]


def test_a_prompts_text_leaves_out_what_the_tokenizer_puts_before_every_text():
    from tokenizers.processors import TemplateProcessing

    from whet.data.tokenizer import byte_tokenizer

    plain, own = byte_tokenizer(), byte_tokenizer()
    begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 258)])
    own.backend_tokenizer.post_processor = begin  # pyright: ignore[reportAttributeAccessIssue]
    assert own("hi").input_ids == [258, 104, 105]
    for tokenizer, ids, text in (
        (own, [258, 104, 105], "hi"),
        (own, [258, 258, 104], "<|im_start|>h"),
        (own, [258], ""),
        (own, [104, 256], "h<|im_end|>"),  # cut on the left: its beginning is gone
        (plain, [258, 104, 105], "<|im_start|>hi"),
    ):
        assert prompt_text(tokenizer, ids) == text
        assert tokenizer(text).input_ids == ids or ids[0] == 104


def test_old_logprobs_end_where_training_stops():
    stops = tuple(range(60))
    c = tunix_cluster(rollout={"eos_tokens": stops, "max_tokens_to_generate": 16})
    out = c.generate(["1+1=", "a", "b", "what?"], seed=0)
    assert any(t[-1] in stops and len(t) < 16 for t in out.tokens)
    width = max(map(len, out.tokens))
    completions = torch.tensor([[*t.tolist(), *[PAD] * (width - len(t))] for t in out.tokens])
    old = c.get_old_per_token_logps(out.left_padded_prompt_tokens, completions)
    want = c.get_actor_per_token_logps(out.left_padded_prompt_tokens, completions, PAD, stops)
    assert torch.equal(old, want)
    assert [int((row != 0).sum()) for row in old] == [len(t) for t in out.tokens]


def test_buffered_values_are_reduced_by_the_aggregation_given_last():
    buffer = MetricsBuffer(global_steps=1, mode="train")
    buffer.add({"x": (np.array([1.0, 2.0]), np.mean), "text": (["a"], None)})
    buffer.add({"x": (6.0, np.mean)})
    assert buffer.reduced() == {"x": 3.0}
