import pytest
import torch
from helpers import completion, gap, one_by_one, prompt, random_batch, same, tiny_model, weights_of

from whet.config import OptimConfig
from whet.errors import ConfigError, TrainingError
from whet.metrics import Mean
from whet.models.load import load_model
from whet.ops import clipped_surrogate, token_weights
from whet.train.role_trainer import RoleTrainer
from whet.train.worker import ModelWorker
from whet.types import Group, TokenBatch


def trainer(**options):
    worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0))
    return RoleTrainer(worker, **{"loss": clipped_surrogate, **options})


def batches(count=4):
    return [random_batch((3, [4, 2 + i]), seed=i) for i in range(count)]


def test_a_mean_over_prompts_counts_the_prompts_of_the_whole_batch():
    # prompts of 3 + 1 and 4 tokens, the first of which is of two completions: 1 / (4 * 2) each
    batch = random_batch((3, [3, 1]), (2, [4]))
    assert trainer(loss_agg_mode="prompt-mean-token-mean").add_loss_weights(batch).weights.tolist() == [0.125] * 8
    batch = batch.replace(mask=batch.trajectory != 2)
    t = trainer(loss_agg_mode="prompt-mean-token-mean")
    assert t.add_loss_weights(batch).weights.tolist() == [0.25] * 4 + [0.0] * 4
    t.set_loss(clipped_surrogate, loss_agg_units="all")
    assert t.add_loss_weights(batch).weights.tolist() == [0.125] * 4 + [0.0] * 4


def test_a_mean_over_all_completions_counts_one_of_two_sequences_once():
    forks = (completion([7, 8]), completion([9, 9], prefix=[97, 5]), completion([7, 8], 1))
    batch = TokenBatch.from_groups([Group(prompt=prompt("a"), completions=forks)])
    batch = batch.replace(mask=batch.trajectory == 0)
    t = trainer(loss_agg_mode="sequence-mean-token-mean")
    t.set_loss(clipped_surrogate, loss_agg_units="all")
    assert t.add_loss_weights(batch).weights.tolist() == [0.125] * 4 + [0.0] * 2


def test_an_update_is_one_step_down_the_gradient_of_the_weighted_loss():
    batch = random_batch((3, [4, 2]), (2, [5]))
    t = trainer(loss_agg_mode="sequence-mean-token-mean")
    before, model = weights_of(t.worker.module), tiny_model()
    weights = token_weights(batch.mask, batch.trajectory, "sequence-mean-token-mean").float()
    logprobs = one_by_one(model, batch)
    ratio = (logprobs - logprobs.detach()).exp()
    (weights * -batch.advantages.float() * ratio).sum().backward()
    metrics = t.update(batch)
    want = {n: before[n] - 0.1 * p.grad for n, p in model.named_parameters()}
    assert gap(weights_of(t.worker.module), want) < 1e-5 * 20
    assert metrics["loss"].value == pytest.approx((weights * -batch.advantages).sum().item(), abs=1e-5)
    assert metrics["learning_rate"].value == pytest.approx(0.1)
    assert t.train_steps == 1


def test_skipped_updates_are_no_steps_and_ten_in_a_row_end_the_run():
    broken = [True] * 3 + [False] + [True] * 10
    t = trainer(loss=lambda x: (x.logprobs * (torch.nan if broken.pop(0) else 1.0), {}))
    batch = batches(1)[0]
    for _ in range(3):
        assert t.update(batch)["optim/skipped"].value == 1.0 and t.train_steps == 0
    t.update(batch)
    assert t.train_steps == 1  # and the count of skipped ones begins anew
    for _ in range(9):
        t.update(batch)
    with pytest.raises(TrainingError, match=r"10 updates in a row.*lower .*lr.*rewards"):
        t.update(batch)
    assert t.train_steps == 1


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_what_a_diverged_role_says_names_its_numbers_and_what_a_resume_needs(caplog, role):
    t = trainer(loss=lambda x: (x.logprobs * torch.nan, {}), role=role)
    t.skipped = 9  # as a resumed run takes it up
    with pytest.raises(TrainingError) as error:
        t.update(batches(1)[0])
    for words in (f"the {role}'s update 1", f"lower {role}.optim.lr", f"{role}_optimizer", "loss nan", "rate 0.1"):
        assert words in str(error.value)
    for words in ("trainer.resume=", "step-*", "trainer.allow_config_change=true"):
        assert words in str(error.value)
    counted = "optim/skipped" if role == "actor" else "critic/optim/skipped"
    assert f"the {role}'s update 1 skipped" in caplog.text and f"; {counted} counts" in caplog.text


def test_the_metrics_of_a_critic_have_a_prefix_and_those_of_the_actor_none():
    actor, critic = trainer(), trainer(role="critic")
    critic.set_metric_reductions({"ppo_kl": {"KL": "max"}})
    parts = batches(2)
    seen = []
    critic.listeners.append(lambda trainer, metrics: seen.append(set(metrics)))
    for found in (lambda t: t.update(parts[0]), lambda t: t.evaluate_batch(parts[1])):
        plain, named = found(actor), found(critic)
        expected = {f"critic/{'KL' if name == 'ppo_kl' else name}" for name in plain}
        assert "loss" in plain and named.keys() == expected
        assert named["critic/loss"].value == plain["loss"].value
    updated = {f"critic/{'KL' if name == 'ppo_kl' else name}" for name in actor.update(parts[0])}
    assert len(seen) == 1 and all(names == updated for names in seen)  # one for each update, none for the evaluation


def test_forks_of_one_episode_are_one_unit_of_the_weights():
    forks = (completion([7, 8]), completion([9, 10], prefix=[97, 5]), completion([7, 8], 1))
    batch = TokenBatch.from_groups([Group(prompt=prompt("a"), completions=forks)])
    weights = trainer(loss_agg_mode="sequence-mean-token-mean").add_loss_weights(batch).weights
    assert weights.tolist() == [1 / 8] * 4 + [1 / 4] * 2


def test_weights_that_a_batch_brings_are_kept():
    batch = random_batch((3, [4, 2]))
    brought = batch.replace(weights=torch.arange(6.0))
    assert trainer().add_loss_weights(brought) is brought


def test_a_loss_is_given_with_its_aggregation_and_may_ask_for_the_entropy():
    batch = random_batch((3, [4, 2]))
    seen = []

    def loss(x):
        seen.append(x.entropy)
        return x.logprobs * 0 + 1, {}

    t = trainer()
    t.set_loss(loss, loss_agg_mode="sequence-mean-token-sum-norm", loss_agg_norm=3.0, entropy=True)
    assert t.update(batch)["loss"].value == pytest.approx(6 / 3)  # six tokens of loss 1 over the norm
    assert seen[0].shape == (6,)
    t.set_loss(loss, loss_agg_mode="token-mean")  # a new mode takes the old norm with it
    assert t.loss_agg_norm is None and t.update(batch)["loss"].value == pytest.approx(1.0)


def test_metrics_are_reduced_and_named_as_asked():
    batch = random_batch((3, [4, 2]))
    ramp = torch.arange(6.0)
    t = trainer(loss=lambda x: (x.logprobs * 0, dict.fromkeys("abcd", ramp)))
    t.set_metric_reductions({"a": "max", "b": ("mean", "min"), "c": {"other/name": "weighted"}})
    found = {n: m.value for n, m in t.update(batch).items()}
    assert found["a"] == 5.0
    assert (found["b/mean"], found["b/min"]) == (2.5, 0.0)
    assert found["other/name"] == pytest.approx(2.5)  # token-mean weights: 1/6 each
    assert found["d"] == 2.5
    assert "b" not in found and "c" not in found
    with pytest.raises(ConfigError, match="did you mean mean"):
        t.set_metric_reductions({"a": "meen"})


def test_an_evaluation_trains_nothing():
    t = trainer()
    before = weights_of(t.worker.module)
    t.evaluate_batch(batches(1)[0])
    assert same(weights_of(t.worker.module), before) and t.train_steps == 0


def test_what_is_left_out_of_an_update_has_been_weighed_and_is_reported_of_the_whole():
    batch = random_batch((3, [4, 2]), (2, [5]))
    calls = []

    def report(found, whole, run):
        calls.append((whole, run))
        return {**found, "left_out": Mean(float(whole.num_tokens - run.num_tokens))}

    t, plain = trainer(), trainer()
    found = t.update(batch, select=lambda whole: torch.tensor([0, 2]), adjust_metrics=report)
    ((whole, run),) = calls
    assert whole.weights.sum().item() == pytest.approx(1.0) and run.num_sequences == 2
    assert torch.equal(run.weights, whole.select(torch.tensor([0, 2])).weights) and found["left_out"].value == 2.0
    plain.update(plain.add_loss_weights(batch).select(torch.tensor([0, 2])))
    assert same(weights_of(t.worker.module), weights_of(plain.worker.module))


def test_updates_are_counted_once_and_told():
    t, told = trainer(), []
    t.listeners.append(lambda who, metrics: told.append((who.train_steps, metrics["loss"].value)))
    first = t.update(random_batch((3, [4, 2])))
    assert told == [(1, first["loss"].value)] and t.train_steps == t.worker.updates == t.worker.optim.updates


def test_what_was_loaded_is_on_policy_whatever_was_updated_before(tmp_path):
    worker = ModelWorker(load_model(tiny_model()), optim=OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0))
    trainer, batch = RoleTrainer(worker, loss=clipped_surrogate), random_batch((3, [4, 2]))
    worker.save(tmp_path)
    assert trainer.is_on_policy(batch)
    trainer.update(batch)
    assert not trainer.is_on_policy(batch)
    trainer.load(tmp_path)  # the weights that drew the batch are back, under the same version
    assert trainer.is_on_policy(batch)
