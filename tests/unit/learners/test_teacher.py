"""A teacher in a run: the column of its logprobs, whole distributions, what is refused, and that it teaches."""

import logging

import pytest
import torch
from helpers import (
    cluster,
    exact_model,
    full,
    gap,
    length_reward,
    one_by_one,
    random_batch,
    rows,
    same,
    tiny_model,
    weights_of,
)
from transformers import BloomConfig, BloomForCausalLM

from whet.config import DataConfig, GRPOConfig, OptimConfig, Role
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.learners.grpo import GRPOLearner
from whet.learners.teacher import with_teacher
from whet.models.load import load_model, save_model
from whet.ops import LogitsProcessors, generalized_jsd, gkd, reinforce, token_weights
from whet.ops.policy_losses import compares_with_teacher
from whet.train.worker import Divergence, ModelWorker

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1}
SHAPES = ((5, [3, 9, 1]), (12, [8, 4]), (2, [7]))


def learner(loss="distillation", *, reward_fns=None, batch_size=2, made=None, **fields):
    """A learner whose cluster has a teacher."""
    made = made or cluster(tiny_model(0, **SMALL), teacher=tiny_model(1, **SMALL), max_steps=4)
    fields = {"beta": 0.0, "num_generations": 4, **fields}
    config = GRPOConfig(policy_loss_fn=loss, **fields)
    return GRPOLearner(made, config, reward_fns, data=DataConfig(batch_size=batch_size, shuffle=False))


# ---- whole distributions in the worker -----------------------------------------------------------------------------


def whole_logprobs(model, batch, temperature):
    """The oracle: transformers' own forward on each sequence alone, [S V] with gradient."""
    before, out = model.config._attn_implementation, []
    model.set_attn_implementation("sdpa")
    for i, (end, n) in enumerate(zip(batch.ends.tolist(), batch.lengths.tolist())):
        prefix, own = batch.prefix(i), batch.tokens[end - n : end]
        logits = model(input_ids=torch.cat([prefix, own])[None], use_cache=False).logits[0, len(prefix) - 1 : -1]
        out.append((logits / temperature).log_softmax(-1))
    model.set_attn_implementation(before)
    return torch.cat(out)


def other_exact_model():
    model = exact_model()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.flip(0))
    return model


def gkd_of_trained(x):
    """What gkd gives, of a divergence that is 0 where masked out."""
    assert not x.divergence[~x.mask].any()
    return gkd(x)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.5, 0.7), (1.0, 1.0)])
def test_loss_and_gradient_are_those_of_whole_logits_however_the_batch_is_cut(beta, temperature):
    batch = random_batch(*SHAPES, masked=True)
    batch = batch.replace(weights=token_weights(batch.mask, batch.trajectory, "sequence-mean-token-mean"))
    student, teacher = exact_model(), other_exact_model()
    with torch.no_grad():
        known = whole_logprobs(teacher, batch, temperature)
    divergence = generalized_jsd(whole_logprobs(student, batch, temperature), known, gkd_beta=beta)
    total = (batch.weights * torch.where(batch.mask, divergence, 0.0)).sum()
    total.backward()
    want = {name: p.grad.clone() for name, p in student.named_parameters()}
    reader, before = ModelWorker(load_model(teacher, role="teacher")), weights_of(teacher)
    for tokens, sequences in ((10_000, None), (40, None), (10_000, 1)):
        student.zero_grad()
        options = {
            "processors": LogitsProcessors(temperature=temperature),
            "max_tokens": tokens,
            "max_sequences": sequences,
        }
        worker = ModelWorker(load_model(student), optim=OptimConfig(name="sgd"), **options)
        found = worker.forward_backward(batch, gkd_of_trained, divergence=Divergence(reader, beta))
        assert found["loss"].value == pytest.approx(total.item(), rel=1e-10)
        assert found["divergence"].value == pytest.approx(divergence[batch.mask].mean().item(), rel=1e-10)
        assert gap({n: m.grad for n, m in worker.optim.masters.items()}, want) < 1e-10
        seen = worker.evaluate(batch, gkd, divergence=Divergence(reader, beta))
        assert seen["loss"].value == pytest.approx(total.item(), rel=1e-10)
    assert same(weights_of(teacher), before) and all(p.grad is None for p in teacher.parameters())


def test_a_support_that_is_cut_has_no_whole_distribution():
    batch = random_batch((3, [2])).replace(weights=torch.ones(2))
    worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig(), processors=LogitsProcessors(top_k=3))
    with pytest.raises(ConfigError, match="compares full distributions, which may have a temperature only"):
        worker.forward_backward(batch, gkd, divergence=Divergence(ModelWorker(load_model(tiny_model(1)))))


# ---- the role ------------------------------------------------------------------------------------------------------


def test_the_column_is_the_teacher_s_logprobs_under_the_rollout_s_temperature():
    made = cluster(tiny_model(0), teacher=tiny_model(1), rollout={"temperature": 0.7})
    batch = with_teacher(made, random_batch(*SHAPES), "teacher_logprobs")
    want = one_by_one(tiny_model(1), batch, temperature=0.7)
    torch.testing.assert_close(batch.teacher_logprobs, want.detach(), rtol=1e-5, atol=1e-5)
    worker = made.worker(Role.TEACHER)
    assert worker.optim is None and not any(p.requires_grad for p in worker.module.parameters())


def test_groups_without_an_advantage_learn_all_the_same_with_rewards_or_without(caplog):
    for reward_fns in (None, lambda completions: [1.0] * len(completions)):
        made = learner(reward_fns=reward_fns)
        assert not made.skips_without_signal and made.planned_passes(2)["teacher"].startswith("runs once")
        before = weights_of(made.cluster.actor.module)
        run = made.train(rows(8))
        assert all(row["skipped/sequences"] == 0 and row["grad_norm"] > 0 for row in run.rows)
        assert run.rows[0]["rewards/advantage/max"] == 0 and gap(weights_of(made.cluster.actor.module), before) > 0
    assert "nothing is learned" not in caplog.text


def test_distillation_with_rewards_is_the_reverse_kl_off_the_advantage():
    made = learner(reward_fns=length_reward, teacher_coef=0.5)
    seen = []
    own = made.update

    def update(step, mini):
        seen.append(mini)
        return own(step, mini)

    made.update = update
    row = made.train(rows(2)).rows[0]
    mini = seen[0]
    assert mini.advantages.abs().max() > 0
    gap_ = (mini.sampler_logprobs - mini.teacher_logprobs)[mini.mask]
    assert row["teacher_kl"] == pytest.approx(gap_.mean().item(), abs=1e-5)
    weights = token_weights(mini.mask, mini.trajectory, "sequence-mean-token-mean")
    loss = -(
        weights * torch.where(mini.mask, mini.advantages - 0.5 * (mini.sampler_logprobs - mini.teacher_logprobs), 0)
    )
    assert row["loss"] == pytest.approx(loss.sum().item(), abs=1e-5)


@pytest.mark.parametrize("beta", [full(0.0), 0.5, full(1.0)])
def test_a_student_learns_a_teacher_s_distribution(beta):
    student, teacher = (tiny_model(seed, **SMALL) for seed in (0, 1))
    made = cluster(student, teacher=teacher, rollout={"max_tokens_to_generate": 1}, max_steps=30, num_epochs=30)
    made = learner("gkd", made=made, batch_size=1, gkd_beta=beta, loss_agg_mode="token-mean")
    found = [row["divergence"] for row in made.train(rows(1)).rows]
    assert found[0] > 0.02 and found[-1] < 0.01 * found[0]


def test_a_student_that_is_its_teacher_learns_nothing():
    model = tiny_model(0, **SMALL)
    made = learner("gkd", made=cluster(model, teacher=model), gkd_beta=0.3)
    assert made.cluster.actor_trainer.needs["divergence"].gkd_beta == 0.3
    assert made.cluster.worker(Role.TEACHER).module is not model  # or it would move with the student
    row = made.train(rows(2)).rows[0]
    assert row["divergence"] < 1e-6 and row["grad_norm"] < 1e-5


def test_a_loss_of_ones_own_may_learn_from_both():
    @compares_with_teacher("divergence")
    def mine(x):
        loss, metrics = reinforce(x)
        return loss + 0.1 * x.need("divergence"), {**metrics, "far": x.divergence.detach()}

    row = learner(mine, reward_fns=length_reward).train(rows(2)).rows[0]
    assert row["far"] > 0 and row["rewards/advantage/max"] > 0


# ---- vocabularies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["distillation", "gkd"])
@pytest.mark.parametrize("ids", [260, 300])
def test_a_vocabulary_may_be_padded_otherwise(loss, ids):
    with torch.random.fork_rng():
        teacher = tiny_model(1, vocab_size=ids, **SMALL)
    made = cluster(
        tiny_model(0, **SMALL),
        teacher=teacher,
        rollout={"forbidden_tokens": tuple(range(259, 264)), "logprobs_mode": "full"},
    )
    row = learner(loss, made=made).train(rows(2)).rows[0]
    assert row["grad_norm"] > 0


def test_a_token_that_the_teacher_has_no_row_for_is_an_error():
    made = cluster(tiny_model(0), teacher=tiny_model(1, vocab_size=260))
    batch = random_batch((3, [2]))
    batch = batch.replace(tokens=torch.tensor([1, 260]))
    with pytest.raises(
        DataError, match=r"sampled token 260, .* knows 260; forbid the padding .* rollout.forbidden_tokens"
    ):
        with_teacher(made, batch, "divergence")


def test_another_tokenizer_is_refused(tmp_path, caplog):
    other = byte_tokenizer()
    other.add_tokens(["<think>"])
    save_model(load_model(tiny_model(1)), other, tmp_path / "other")
    with pytest.raises(
        ConfigError, match="other has another tokenizer than the policy: '<think>' is 259 there and no token here"
    ):
        cluster(teacher=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="knows 200 token ids and the policy's tokenizer has 259"):
        cluster(teacher=tiny_model(1, vocab_size=200, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    save_model(load_model(tiny_model(1)), byte_tokenizer(), tmp_path / "same")
    save_model(load_model(tiny_model(1)), None, tmp_path / "none")
    with caplog.at_level(logging.INFO):
        for name in ("same", "none"):
            assert Role.TEACHER in cluster(teacher=str(tmp_path / name)).workers
    assert caplog.text.count("has no tokenizer; as teacher it reads the policy's token ids") == 1


# ---- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "teacher", "rollout", "message"),
    [
        ("distillation", False, {}, r"learns from a teacher; pass RLCluster\(teacher=...\)"),
        ("gkd", False, {}, r"learns from a teacher; pass RLCluster\(teacher=...\)"),
        ("gkd", True, {"top_k": 5}, "set rollout.logprobs_mode=full"),
        ("gkd", True, {"forbidden_tokens": (1,)}, "set rollout.logprobs_mode=full"),
    ],
)
def test_what_does_not_fit_is_said_at_once(loss, teacher, rollout, message):
    made = cluster(teacher=tiny_model(1) if teacher else None, rollout=rollout)
    with pytest.raises(ConfigError, match=message):
        learner(loss, made=made)


def test_models_that_do_not_run_the_same_passes_are_refused():
    torch.manual_seed(0)
    padded = BloomForCausalLM(BloomConfig(vocab_size=264, hidden_size=16, n_layer=1, n_head=2))
    made = cluster(tiny_model(0, **SMALL), teacher=padded, max_steps=1)
    with pytest.raises(ConfigError, match="BloomForCausalLM can't use packed rows"):
        learner("gkd", made=made)
    assert learner("distillation", made=made).train(rows(2)).rows[0]["grad_norm"] > 0


def test_without_a_teacher_rewards_are_still_needed():
    with pytest.raises(ConfigError, match=r"reward_fns .* is empty"):
        learner("grpo")
    with pytest.raises(ConfigError, match=r"gkd_beta must be between 0 .* and 1"):
        GRPOConfig(gkd_beta=2.0)


def test_a_learner_may_bring_the_column_itself():
    class Own(GRPOLearner):
        @property
        def needs_teacher(self):
            return False

        def score(self, step):
            step = super().score(step)
            zeros = torch.zeros(step.batch.num_tokens)
            return step.replace(batch=step.batch.with_token_columns(teacher_logprobs=zeros))

    config = GRPOConfig(beta=0.0, policy_loss_fn="distillation")
    assert Own(cluster(), config, None, data=DataConfig(batch_size=2)).train(rows(2)).rows[0]["teacher_kl"] < 0
