"""Programs of Tunix's users with one import changed: external loggers, hooks, a resume, overrides, workers, helpers."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import gap, prompt, random_batch, tiny_model, weights_of
from transformers import Qwen3ForSequenceClassification, Qwen3ForTokenClassification

import whet.tunix
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.learners import grpo
from whet.learners.step import Step
from whet.tunix import (
    CheckpointingOptions,
    ClusterConfig,
    DataHooks,
    GRPOConfig,
    GRPOLearner,
    InferenceWorker,
    Mode,
    OptimConfig,
    PerfMetricsConfig,
    PerfMetricsExport,
    PPOConfig,
    PPOLearner,
    RLCluster,
    RLTrainingConfig,
    Role,
    RolloutConfig,
    TokenizerAdapter,
    TrainExample,
    TrainingHooks,
    VanillaRollout,
    common,
)
from whet.tunix.learners import _reward_metrics
from whet.types import TokenBatch

ROWS = [{"prompts": np.array(["1+1=", "2+2="]), "answer": np.array(["2", "4"])}] * 4
PAD, EOS, LONGEST = 257, 256, 6


def distinct(prompts, completions, answer, **_):
    """Another reward for nearly every completion."""
    assert len(answer) == len(completions) == len(prompts)
    return [float(len(set(text)) + len(text) / 10) for text in completions]


def cluster(critic=None, reference=None, reward=None, perf_config=None, **training):
    options = {
        "actor_optimizer": OptimConfig(lr=1e-2),
        "eval_every_n_steps": 2,
        "max_steps": 2,
        "pbar_description": None,
    }
    rollout = RolloutConfig(
        max_tokens_to_generate=LONGEST, max_prompt_length=16, kv_cache_size=64, return_logprobs=True
    )
    return RLCluster(
        actor=tiny_model(),
        critic=critic,
        reference=reference,
        reward=reward,
        tokenizer=TokenizerAdapter(byte_tokenizer()),
        cluster_config=ClusterConfig(
            role_to_mesh={}, rollout_config=rollout, training_config=RLTrainingConfig(**{**options, **training})
        ),
        perf_config=perf_config,
    )


def learner(c, kind=GRPOLearner, **options):
    return kind(rl_cluster=c, algo_config=GRPOConfig(num_generations=2, beta=0.0), reward_fns=[distinct], **options)


# ---- what a program is told ------------------------------------------------------------------------------------------


def test_an_external_logger_sees_rewards_and_completions_of_steps_and_of_evaluations():
    c, told = cluster(), []
    assert c.with_external_metrics_logger(told.append) is c
    length = lambda completions, **_: {"own/length": (np.mean([len(text) for text in completions]), np.mean)}
    run = learner(c, metric_fns=[length]).train(ROWS, ROWS[:1])
    assert [(b.global_steps, b.mode) for b in told] == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]
    for buffer in told:
        values, how = buffer.metrics["rewards/distinct"]
        assert how is np.mean and np.shape(values) == (1, 4)
        assert len(buffer.metrics["completions"][0][0]) == len(buffer.metrics["trajectory_ids"][0][0]) == 4
        assert {"rewards/sum", "rewards/score/max", "completions/mean_length", "prompts"} <= set(buffer.metrics)
    first, row = told[1], next(row for row in run.rows if row["mode"] == "train")
    assert first.reduced()["rewards/score/mean"] == pytest.approx(row["reward"]) == row["rewards/score/mean"]
    assert row["rewards/sum"] == row["rewards/mean"] == row["rewards/distinct"]  # there is one function
    assert (row["rewards/min"], row["rewards/max"]) == (row["rewards/score/min"], row["rewards/score/max"])
    assert first.reduced()["completions/mean_length"] == pytest.approx(row["completions/mean_length"])
    assert "own/length" in first.metrics and row["own/length"] == pytest.approx(first.reduced()["own/length"])


class Recorded(TrainingHooks):
    def __init__(self):
        self.events = []

    def on_train_start(self, train_ctx):
        self.events.append("start")

    def on_train_end(self, train_ctx):
        self.events.append("end")

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        assert type(train_loss) is float and train_ctx.iter_steps == train_ctx.accumulate * train_step
        self.events.append(train_step)

    def on_eval_step_end(self, train_ctx, eval_loss):
        assert type(eval_loss) is float
        self.events.append("eval")


def test_hooks_are_given_the_loss_as_a_number_and_evaluations_fire_them():
    c, hooks = cluster(mini_batch_size=2, train_micro_batch_size=1), Recorded()
    c.actor_trainer.with_training_hooks(hooks)
    learner(c).train(ROWS, ROWS[:1], skip_jit=True)
    assert hooks.events == ["start", "eval", 1, 2, "eval", "end"] and c.actor_trainer.iter_steps == 4
    before = weights_of(c.actor.module)
    learner(c).evaluate(ROWS[:1])
    assert gap(before, weights_of(c.actor.module)) == 0  # an evaluation's loss trains nothing


def test_hooks_are_called_around_each_update_and_each_evaluation():
    class Noted(Recorded):
        def on_train_step_start(self, train_ctx):
            self.events.append(("start", train_ctx.train_steps))

        def on_eval_step_start(self, train_ctx):
            self.events.append("eval start")

    hooks = Noted()
    trainer = cluster().actor_trainer.with_training_hooks(hooks)
    assert trainer.training_hooks is hooks
    trainer.update_all([example(), example()])
    trainer.evaluate([example()])
    assert hooks.events == [("start", 0), 1, ("start", 1), 2, "eval start", "eval"]


def test_accumulated_batches_are_weighted_and_stepped_as_one():
    parts = [random_batch((3, [4, 2 + i]), seed=i) for i in range(5)]  # a mean of means would differ
    many = cluster(mini_batch_size=4, train_micro_batch_size=2).actor_trainer
    metrics, one = many.update_all(parts), cluster().actor_trainer
    losses = [one.update(TokenBatch.cat(parts[i : i + 2]))["loss"].value for i in (0, 2, 4)]  # the last step is smaller
    assert many.train_steps == one.train_steps == 3
    assert gap(weights_of(many.model), weights_of(one.model)) == 0
    assert metrics["loss"].value == pytest.approx(sum(losses) / 3)


def test_a_loss_without_metrics_is_called_for_its_tensor_alone():
    nll = lambda x: -x.logprobs
    a, b = cluster().actor_trainer.with_loss_fn(nll, has_aux=False), cluster().actor_trainer
    b.with_loss_fn(lambda x: (nll(x), {}))
    assert a.update_all([example()])["loss"].value == b.update_all([example()])["loss"].value
    assert gap(weights_of(a.model), weights_of(b.model)) == 0


def example(rows=2):
    ids = torch.tensor([[65, 66, EOS], [67, 68, EOS]])[:rows]
    ones = torch.ones_like(ids)
    return TrainExample(
        prompt_ids=ids, prompt_mask=ones, completion_ids=ids, completion_mask=ones, advantages=torch.tensor([1.0, -1.0])
    )


class Batches(DataHooks):
    def __init__(self, count):
        self.left = [example()] * count

    def load_next_train_batch(self, train_ctx):
        return self.left.pop() if self.left else None

    def load_next_eval_batch(self, train_ctx):
        return self.left.pop() if self.left else None


def test_a_trainer_s_data_hooks_give_its_batches_and_a_learner_refuses_them():
    c, hooks = cluster(max_steps=3), Recorded()
    trainer = c.actor_trainer.with_data_hooks(Batches(5))
    trainer.with_training_hooks(hooks)
    assert "loss" in trainer.train(None) and trainer.train_steps == 3  # max_steps, of five batches
    assert hooks.events == ["start", 1, 2, 3, "end"]
    with pytest.raises(ConfigError, match=r"the actor's trainer has data hooks, .* replace _generate_and_compute"):
        learner(c).train(ROWS)


def test_a_trainer_evaluates_before_and_between_its_updates():
    c, hooks = cluster(max_steps=None), Recorded()
    c.actor_trainer.with_training_hooks(hooks)
    c.train(Role.ACTOR, [example()], [example()])
    assert hooks.events == [1, "eval"]
    c.actor_trainer.train([example()] * 3, [example()])
    assert hooks.events[2:] == ["eval", "start", 2, "eval", 3, 4, "eval", "end"]
    assert c.eval_actor(None) is None and "loss" in c.eval_actor([example()])
    with pytest.raises(ConfigError, match="the role 'critic' is not trained; these are: actor"):
        c.train(Role.CRITIC, [])


def test_functions_of_numpy_say_how_metrics_are_reduced_and_others_are_refused():
    trainer = cluster().actor_trainer.with_rl_metrics_to_log({"kl": np.mean, "is_ratio": np.max})
    assert trainer.reductions["kl"] == {"kl": "mean"} and trainer.reductions["is_ratio"] == {"is_ratio": "max"}
    assert trainer.with_tqdm_metrics_to_display([lambda: "kl", lambda: None, "loss"]).displayed == ("kl", "loss")
    with pytest.raises(ConfigError, match=r"metric kl can't be reduced by 'median': .* give np.mean, np.max or np.min"):
        trainer.with_rl_metrics_to_log({"kl": np.median})
    with pytest.raises(ConfigError, match="unknown reduction of metric kl 'mean'"):
        trainer.set_metric_reductions({"kl": np.mean})  # whet's own takes words


def test_rewards_over_several_functions_by_hand():
    # totals: 1, 3, 2, 2, 5 and one completion to which no function applies
    nan = np.nan
    a, b = np.array([1.0, 2, nan, 2, 5, nan]), np.array([0.0, 1, 2, 0, nan, nan])
    found = _reward_metrics(SimpleNamespace(table={"a": a, "b": b}, total=np.array([1.0, 3, 2, 2, 5, nan])))
    assert found["rewards/sum"] == (1 + 3 + 2 + 2 + 5) / 5 and found["rewards/mean"] == (0.5 + 1.5 + 2 + 1 + 5) / 5
    assert (found["rewards/min"], found["rewards/max"]) == (0.0, 5.0)
    assert [found[f"rewards/score/{how}"] for how in ("mean", "max", "min")] == [2.6, 5.0, 1.0]
    assert _reward_metrics(SimpleNamespace(table={"a": np.full(2, nan)}, total=np.full(2, nan))) == {}


@pytest.mark.parametrize("name", ["max", "mean", "min", "score", "sum"])
def test_a_reward_may_not_have_the_name_of_a_metric_over_all_functions(name):
    reward = lambda completions, **_: [0.0] * len(completions)
    reward.__name__ = name
    with pytest.raises(ConfigError, match=f"named '{name}', but in whet.tunix the metric rewards/{name} is over all"):
        GRPOLearner(cluster(), GRPOConfig(num_generations=2, beta=0.0), [reward])


def test_a_default_of_tunix_s_without_effect_is_not_warned_of(caplog):
    c = cluster()
    learner(c)
    assert "kl_loss_mode" not in caplog.text
    GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0, kl_loss_mode="mse_kl"), [distinct])
    assert "kl_loss_mode='mse_kl': no effect while beta is 0.0" in caplog.text


# ---- meshes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meshes", "message"),
    [
        ("cuda", "the meshes are 'cuda' (str), and must be a dict of Role to mesh"),
        ({Role.ACTOR: "cuda"}, "the mesh of actor is 'cuda' (str); a mesh is a torch DeviceMesh, a jax Mesh, a dict"),
        ({"rollout": {"fsdp": 2}}, "the mesh of rollout is fsdp=2 = 2 devices, and torchrun has started 1 process(es)"),
        ({Role.ACTOR: ((1, 2), ("fsdp", "tp"))}, "fsdp=1 x tp=2 = 2 devices, and a mesh here has axes of data alone"),
        ({Role.ACTOR: ((1, 2), ("fsdp",))}, "the mesh of actor is ((1, 2), ('fsdp',)) (tuple)"),
        ({"actr": None}, "unknown role of a mesh 'actr'; did you mean actor?"),
    ],
)
def test_a_wrong_mesh_is_refused(meshes, message):
    with pytest.raises(ConfigError) as error:
        ClusterConfig(role_to_mesh=meshes)
    assert message in str(error.value)


def torch_mesh(*shape, device="cpu", names=None):
    return SimpleNamespace(device_type=device, shape=shape, mesh_dim_names=names)


@pytest.mark.parametrize(
    ("mesh", "processes"),
    [
        (torch_mesh(1), 1),
        (torch_mesh(2), 2),
        (torch_mesh(2, 2, names=("replica", "fsdp")), 4),
        (SimpleNamespace(axis_names=("fsdp", "tp"), shape={"fsdp": 2, "tp": 1}), 2),
        ({"dp": 2, "fsdp": 2}, 4),
        (((4, 1), ("fsdp", "tp")), 4),
    ],
)
def test_a_mesh_of_torchruns_processes_is_taken_and_another_refused(mesh, processes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert ClusterConfig(role_to_mesh={"actor": mesh, "critic": None}).role_to_mesh.keys() == {Role.ACTOR}
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=rf"= {processes} devices, and torchrun has started 3 process\(es\)"):
        ClusterConfig(role_to_mesh={"actor": mesh})


def test_a_mesh_says_on_which_kind_of_device_a_role_is_loaded():
    mesh = torch_mesh(1, device="meta")
    config = ClusterConfig(role_to_mesh={Role.REFERENCE: mesh, Role.ROLLOUT: None})
    made = RLCluster(actor=tiny_model(), tokenizer=byte_tokenizer(), cluster_config=config)
    assert made.r2m == {Role.REFERENCE: mesh}
    assert made.device(whet.config.Role.REFERENCE).type == made.device(Role.REFERENCE).type == "meta"
    assert made.device(Role.ACTOR).type != "meta"


def test_a_role_equals_whet_s_role_of_that_name():
    assert {role.value for role in Role} == {role.value for role in whet.config.Role} | {"rollout"}
    assert all(Role(role.value) == role and hash(Role(role.value)) == hash(role) for role in whet.config.Role)


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_there_is_gone_on_from(tmp_path):
    saving = {
        "checkpoint_root_directory": str(tmp_path / "c"),
        "checkpointing_options": CheckpointingOptions(save_interval_steps=1),
    }
    first = cluster(**saving)
    assert first.actor_trainer.restored_global_step() == 0
    learner(first).train(ROWS)
    second = cluster(**saving, **{"max_steps": 4})
    assert second.actor_trainer.restored_global_step() == 2 and second.actor_trainer.train_steps == 0
    hooks = Recorded()
    second.actor_trainer.with_training_hooks(hooks)
    hooks.on_train_step_end = lambda train_ctx, train_step, train_loss: hooks.events.append(train_step)
    learner(second).train(ROWS)
    whole = cluster(max_steps=4)
    learner(whole).train(ROWS)
    assert hooks.events == ["start", 3, 4, "end"] and second.global_steps == 4
    assert gap(weights_of(second.actor.module), weights_of(whole.actor.module)) == 0


# ---- a rollout of one's own ------------------------------------------------------------------------------------------


class Same(GRPOLearner):
    def _generate_and_compute_advantage(self, training_input, mode=Mode.TRAIN):
        assert training_input["prompts"] == ["1+1=", "1+1=", "2+2=", "2+2="]
        assert list(training_input["answer"]) == ["2", "2", "4", "4"] and training_input["trajectory_ids"][:2] in (
            ["0_0", "0_1"],
            ["2_0", "2_1"],
        )
        return super()._generate_and_compute_advantage(training_input, mode)


class SamePPO(PPOLearner):
    def _generate_and_compute_advantage(self, training_input, mode=Mode.TRAIN):
        return super()._generate_and_compute_advantage(training_input, mode)


class Still(GRPOLearner):
    def _generate_and_compute_advantage(self, training_input, mode=Mode.TRAIN):
        made = super()._generate_and_compute_advantage(training_input, mode)
        return dataclasses.replace(made, advantages=made.advantages * 0)


class Own(GRPOLearner):
    """From nothing, as Tunix's own is written."""

    def _generate_and_compute_advantage(self, training_input, mode=Mode.TRAIN):
        rollout, prompts = self.rl_engine.rollout, training_input["prompts"]
        pad, columns = rollout.pad_id(), {k: v for k, v in training_input.items() if k != "prompts"}
        out = self.rl_engine.generate(prompts=prompts, mode=mode)
        ids = np.array([common.pad_to_length(t, LONGEST, pad).numpy() for t in out.tokens])
        rewards = self._compute_rewards(prompts=prompts, completions=out.text, mode=mode, **columns)
        self.rl_engine.buffer_metrics({"own/reward": (rewards, np.mean)}, mode=mode)
        return TrainExample(
            prompt_ids=out.left_padded_prompt_tokens,
            prompt_mask=out.left_padded_prompt_tokens != pad,
            completion_ids=ids,
            completion_mask=ids != pad,
            advantages=rewards - rewards.mean(),
        )


def test_a_replaced_generation_is_what_is_trained_on():
    plain, same, still = (cluster() for _ in range(3))
    started = weights_of(plain.actor.module)
    rows = [learner(c, kind).train(ROWS).rows for c, kind in ((plain, GRPOLearner), (same, Same), (still, Still))]
    assert gap(weights_of(plain.actor.module), weights_of(same.actor.module)) == 0
    assert gap(started, weights_of(plain.actor.module)) > 0 == gap(started, weights_of(still.actor.module))
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]


def test_data_are_taken_in_their_order_and_once():
    c, told = cluster(max_steps=10), []
    c.with_external_metrics_logger(lambda b: told.append(b.metrics["trajectory_ids"][0][0][0]))
    assert learner(c).train(ROWS).step == len(ROWS)
    assert told == ["0_0", "2_0", "4_0", "6_0"]


def test_a_generation_from_nothing_has_its_rewards_logged():
    c = cluster()
    started = weights_of(c.actor.module)
    run = learner(c, Own).train(ROWS)
    assert [row["reward"] for row in run.rows] == pytest.approx([row["own/reward"] for row in run.rows])
    assert gap(started, weights_of(c.actor.module)) > 0
    two = cluster(mini_batch_size=1)  # two updates a step: the second is compared with the policy before the first
    run = learner(two, Own).train(ROWS)
    assert two.actor_trainer.train_steps == 4 and run.rows[0]["is_ratio/max"] > 1 + 1e-6
    padded = dataclasses.replace(example(), completion_mask=torch.tensor([[1, 1, 1], [1, 0, 0]]))
    (group,) = learner(c, Own)._groups(Step(index=1, prompts=[prompt("a")]), padded)
    found = [(c.tokens.tolist(), c.finish_reason) for c in group.completions]
    assert found == [([65, 66, EOS], "stop"), ([67], "length")]
    short = type("Short", (Own,), {"_generate_and_compute_advantage": lambda self, given, mode: example()})
    with pytest.raises(DataError, match="returned 2 rows for 2 prompts of 2 generations"):
        learner(cluster(), short).train(ROWS)


def test_ppo_s_generation_may_be_replaced_too():
    critic = lambda: tiny_model(seed=1)
    found = []
    for kind in (PPOLearner, SamePPO):
        c = cluster(critic=critic())
        run = kind(rl_engine=c, ppo_config=PPOConfig(beta=0.0), reward_fns=distinct).train(ROWS)
        found.append(([row["critic/loss"] for row in run.rows], weights_of(c.actor.module)))
    assert found[0][0] == found[1][0] and gap(found[0][1], found[1][1]) == 0


@pytest.mark.parametrize("name", ["prepare_dataset", "_prepare_data", "_run_global_step"])
def test_what_is_never_called_may_not_be_replaced(name):
    with pytest.raises(ConfigError, match=f"Mine.{name} would never be called: .* replace _generate_and_compute"):
        type("Mine", (GRPOLearner,), {name: lambda self: None})


def test_one_thing_has_one_of_its_names():
    c = cluster()
    with pytest.raises(ConfigError, match="rl_cluster and rl_engine name the same thing"):
        GRPOLearner(rl_cluster=c, rl_engine=c, algo_config=GRPOConfig(), reward_fns=distinct)
    assert issubclass(GRPOLearner, grpo.GRPOLearner) and GRPOLearner(
        rl_engine=c, grpo_config=GRPOConfig(beta=0.0), reward_fns=distinct
    ).rl_engine is c  # fmt: skip


# ---- workers ---------------------------------------------------------------------------------------------------------


def test_a_cluster_s_rollout_generates_scores_and_knows_its_ids():
    c = cluster()
    worker, config = c.rollout, RolloutConfig(max_tokens_to_generate=3, return_logprobs=True, seed=1)
    out = worker.generate(["1+1=", "7"], config)
    assert (worker.pad_id(), worker.eos_id(), worker.model()) == (PAD, EOS, c.actor.module)
    assert max(map(len, out.tokens)) <= 3 and out.text == worker.generate(["1+1=", "7"], config).text
    ids = torch.stack([common.pad_to_length(t, 3, PAD) for t in out.tokens])
    for row, tokens, logps in zip(
        worker.get_per_token_logps(out.left_padded_prompt_tokens, ids), out.tokens, out.logprobs, strict=True
    ):
        assert row[: len(tokens)].numpy() == pytest.approx(logps, abs=1e-4)
    assert worker.stats() and worker.caps.logprobs  # the engine's own
    with pytest.raises(ConfigError, match="the rollout takes the actor's weights"):
        worker.update_params({})


def test_a_vanilla_rollout_samples_scores_and_takes_weights():
    first, second = tiny_model(), tiny_model(seed=5)
    rollout = VanillaRollout(first, TokenizerAdapter(byte_tokenizer()), 64)
    config = RolloutConfig(max_tokens_to_generate=4, temperature=1.0, seed=3, return_logprobs=True)
    out = rollout.generate(["1+1="], config)
    found = rollout.get_per_token_logps(out.left_padded_prompt_tokens, out.tokens)
    assert found[0].numpy() == pytest.approx(out.logprobs[0], abs=1e-4)
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (PAD, EOS, first)
    rollout.update_params(second.state_dict())
    moved = rollout.generate(["1+1="], config)
    want = VanillaRollout(second, byte_tokenizer()).generate(["1+1="], config)
    assert moved.tokens[0].tolist() == want.tokens[0].tolist() and gap(weights_of(first), weights_of(second)) == 0
    with pytest.raises(ConfigError, match=r"unknown parameter of the model 'lm_headd.weight'; did you mean lm_head"):
        rollout.update_params({"lm_headd.weight": torch.zeros(1)})


def test_an_inference_worker_scores_with_the_models_it_is_given():
    config = tiny_model().config
    config.num_labels = 1
    reward, critic = Qwen3ForSequenceClassification(config).eval(), Qwen3ForTokenClassification(config).eval()
    worker = InferenceWorker({"reward": reward, "critic": critic, "reference": tiny_model()})
    prompts, ids = torch.tensor([[PAD, 65], [66, 67]]), torch.tensor([[65, 66, EOS], [67, EOS, PAD]])
    given = (prompts, ids, PAD, EOS)
    rewards, values = worker.compute_rewards(*given), worker.compute_values(*given)
    assert rewards.shape == values.shape == (2, 5)
    alone = common.compute_score(reward, prompts[:1, 1:], ids[:1], PAD, EOS)
    assert rewards[0, 1:].numpy() == pytest.approx(alone[0].numpy(), abs=1e-5)  # padding on the left changes nothing
    with torch.no_grad():
        pooled = reward(input_ids=torch.tensor([[65, 65, 66, EOS]])).logits
    reward.config.pad_token_id = None
    assert alone[0, -1].item() == pytest.approx(pooled.item(), abs=1e-5)
    assert worker.get_ref_per_token_logps(*given).shape == (2, 3)
    assert worker.get_model("critic") is critic
    with pytest.raises(ConfigError, match=r"'reward' is not available; there are: critic"):
        InferenceWorker({"critic": critic}).get_rewards(*given)
    with pytest.raises(ConfigError, match="unknown role of an InferenceWorker 'actor'"):
        InferenceWorker({"actor": critic})


def test_a_cluster_s_inference_worker_has_its_models():
    config = tiny_model().config
    config.num_labels = 1
    c = cluster(critic=tiny_model(seed=1), reward=Qwen3ForSequenceClassification(config).eval())
    prompts, ids = torch.tensor([[PAD, 65], [66, 67]]), torch.tensor([[65, 66, EOS], [67, EOS, PAD]])
    worker = c.inference_worker
    values, rewards = worker.compute_values(prompts, ids, PAD, EOS), worker.compute_rewards(prompts, ids, PAD, EOS)
    assert values.shape == (2, 3) and values[1, 2] == 0 and rewards.shape == (2,)
    per_token = common.compute_score(worker.get_model("reward"), prompts, ids, PAD, EOS)
    assert rewards.tolist() == pytest.approx([per_token[0, 4].item(), per_token[1, 3].item()], abs=1e-4)


def test_perf_metrics_are_tunix_s_own_export_or_refused():
    config = PerfMetricsConfig()
    config.custom_export_fn = PerfMetricsExport.from_cluster_config(None)
    assert cluster(perf_config=config).perf_config is None
    with pytest.raises(ConfigError, match=r"PerfMetricsConfig.custom_export_fn_v2: there are no Tunix spans"):
        cluster(perf_config=PerfMetricsConfig(custom_export_fn_v2=print))


# ---- helpers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "norm", "want"),
    [
        ("token-mean", None, 0.36),
        ("sequence-mean-token-mean", None, 0.325),
        ("sequence-mean-token-scale", 3.14, (0.3 + 1.5) / 3.14 / 2),
        ("sequence-mean-token-scale", None, 0.3),
        ("seq-mean-token-sum", None, 0.9),
        ("sequence-mean-token-sum-norm", 4.0, 0.45),
    ],
)
def test_losses_of_padded_rows_are_aggregated_as_in_tunix(mode, norm, want):
    loss, mask = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[1, 1, 0], [1, 1, 1]]
    assert common.aggregate_loss(loss, mask, mode, norm=norm).item() == pytest.approx(want)


def test_masks_positions_and_divergences():
    ids, positions, seen, there = common.process_ids([[PAD, 5], [6, 7]], [[8, PAD], [9, 9]], PAD, EOS)
    assert ids.tolist() == [[PAD, 5, 8, PAD], [6, 7, 9, 9]] and there.tolist() == [[0, 1, 1, 0], [1, 1, 1, 1]]
    assert positions.tolist() == [[0, 0, 1, 1], [0, 1, 2, 3]]
    assert seen[0].long().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]
    assert common.np_make_completion_mask(np.array([[1, 2, 0, 0]]), 0).tolist() == [[1, 1, 1, 0]]
    assert common.pad_to_length(torch.ones(1, 2), 3, axis=1).tolist() == [[1, 1, 0]]
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert common.compute_kl_divergence(new, ref, "mse_kl").tolist() == pytest.approx([0.125, 0.5])
    assert common.compute_kl_divergence(new * 100, ref, "kl", clamp_value=5).tolist() == [-5, -5]
    with pytest.raises(ConfigError, match="unknown KL method 'k4'"):
        common.compute_kl_divergence(new, ref, "k4")
    with pytest.raises(ConfigError, match="whet packs sequences by itself"):
        common.aggregate_loss([[1.0]], [[1]], "token-mean", segment_ids=[[1]])


def test_log_probabilities_do_not_depend_on_padding_and_have_a_gradient_on_request():
    model = tiny_model()
    prompts, ids = torch.tensor([[PAD, 65], [66, 67]]), torch.tensor([[65, 66, EOS], [67, EOS, PAD]])
    logps, entropy = common.compute_per_token_logps(model, prompts, ids, PAD, EOS, return_entropy=True, temperature=0.5)
    alone = common.compute_per_token_logps(model, prompts[:1, 1:], ids[:1], PAD, EOS, temperature=0.5)
    assert logps[0].numpy() == pytest.approx(alone[0].numpy(), abs=1e-5)
    assert entropy.shape == (2, 3) and not logps.requires_grad
    trained = common.compute_per_token_logps(model, prompts, ids, PAD, EOS, stop_gradient=False)
    whole, positions, seen, _ = common.process_ids(prompts, ids, PAD, EOS)
    old_form = common.get_per_token_logps(model, whole, positions, seen, 3)
    assert trained.requires_grad
    assert trained[0].tolist() == pytest.approx(old_form[0].tolist(), abs=1e-5)


# ---- names and errors ------------------------------------------------------------------------------------------------


def test_names_that_are_not_there_say_what_is_and_all_others_are():
    assert [name for name in whet.tunix.__all__ if getattr(whet.tunix, name) is None] == []
    for name in whet.tunix.ABSENT:
        with pytest.raises(ImportError, match=f"whet.tunix has no {name}: "):
            exec(f"from whet.tunix import {name}")


def test_wrong_values_are_named_when_a_configuration_is_made():
    with pytest.raises(ConfigError, match=r"RolloutConfig.seed: expected an integer, got array\(\[0, 7\]"):
        RolloutConfig(seed=np.array([0, 7], dtype=np.uint32))  # as jax.random.PRNGKey(7)
    with pytest.raises(ConfigError, match="unknown kl_method 'x'"):
        PPOConfig(kl_method="x")
    with pytest.raises(ConfigError, match=r"PPOConfig.mini_batch_size: set it in RLTrainingConfig"):
        PPOConfig(mini_batch_size=4)
