import json
import logging

import numpy as np
import pandas
import pytest
import torch
from helpers import cluster, drawn, length_reward, rows, same, tiny_model, weights_of

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, Mode, OptimConfig, RolloutConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError, RewardError
from whet.learners.grpo import GRPOLearner
from whet.run.observer import Observer


def learner(c=None, reward=length_reward, *, shuffle_seed=None, data=None, **algo):
    config = GRPOConfig(**{"num_generations": 2, "beta": 0.0, **algo})
    data = DataConfig(**{"batch_size": 4, "shuffle": False, **(data or {})})
    return GRPOLearner(cluster() if c is None else c, config, reward, data_shuffle_seed=shuffle_seed, data=data)


def prompts_of(made, monkeypatch):
    """The rows that each step samples."""
    seen, sample = [], made.sample

    def noted(step):
        seen.append([p.row for p in step.prompts])
        return sample(step)

    monkeypatch.setattr(made, "sample", noted)
    return seen


# ---- batches -------------------------------------------------------------------------------------------------------


def groups_of(made, monkeypatch):
    """The prompts of each update."""
    seen, update = [], made.update

    def noted(step, mini):
        starts = [int(i) for i in mini.prefix_of[:: made.num_generations]]
        seen.append([bytes(mini.prefix(2 * k).tolist()).decode() for k in range(len(starts))])
        return update(step, mini)

    monkeypatch.setattr(made, "update", noted)
    return seen


def test_a_step_is_cut_into_mini_batches_of_whole_groups_for_each_iteration(monkeypatch):
    made = learner(cluster(mini_batch_size=2), num_iterations=2)
    seen = groups_of(made, monkeypatch)
    run = made.train(rows(8))
    first, second = [["0+1=", "1+1="], ["2+1=", "3+1="]], [["4+1=", "5+1="], ["6+1=", "7+1="]]
    assert seen == [*first, *first, *second, *second]
    assert run.step == 2 and made.cluster.actor_trainer.train_steps == 8  # 2 steps x 2 iterations x 2 mini-batches
    assert [row["optim/updates"] for row in run.rows] == [4.0, 8.0]
    assert made.cluster.actor.version == 2  # versions count steps


def test_mini_batches_are_shuffled_anew_in_each_pass_by_their_seed(monkeypatch):
    orders = []
    for seed in (1, 1, 2):
        made = learner(cluster(mini_batch_size=1), shuffle_seed=seed, num_iterations=3)
        seen = groups_of(made, monkeypatch)
        made.train(rows(4))
        passes = [[g for (g,) in seen[i : i + 4]] for i in (0, 4, 8)]
        assert all(sorted(p) == ["0+1=", "1+1=", "2+1=", "3+1="] for p in passes)  # each group once in each pass
        orders.append(passes)
    assert orders[0] == orders[1] != orders[2]
    assert len({tuple(p) for p in orders[0]}) > 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"mini_batch_size": 3}, "batch_size=8 must be a multiple of mini_batch_size=3"),
        ({"mini_batch_size": 4, "train_micro_batch_size": 3}, "mini_batch_size=4 must be a multiple of train_micro"),
        ({"train_micro_batch_size": 2}, "`mini_batch_size` must be set when `train_micro_batch_size` is set"),
        ({"rollout_micro_batch_size": 3}, "batch_size=8 must be a multiple of rollout_micro_batch_size=3"),
        ({"compute_logps_micro_batch_size": 3}, "batch_size=8 must be a multiple of compute_logps_micro_batch_size=3"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: an update covers all of its rows"),
        ({"mini_batch_size": -8}, "mini_batch_size"),
        ({"mini_batch_size": True}, "mini_batch_size"),
        ({"mini_batch_size": 2.5}, "mini_batch_size"),
    ],
)
def test_sizes_that_do_not_divide_each_other_are_refused_before_anything_is_sampled(sizes, words):
    with pytest.raises(ConfigError, match=words):
        learner(cluster(**sizes), data={"batch_size": 8}).train(rows(8))


def test_numpy_sizes_are_sizes():
    assert learner(cluster(mini_batch_size=np.int64(2))).train(rows(4)).step == 1


# ---- data ----------------------------------------------------------------------------------------------------------


def test_the_run_ends_with_the_data_or_with_max_steps_whichever_is_first():
    steps = lambda count, **training: learner(cluster(**training)).train(rows(count)).step
    assert steps(8) == 2
    assert steps(8, max_steps=1) == 1
    assert steps(8, max_steps=5) == 5  # the data again, since no epochs are asked for
    assert steps(8, max_steps=5, num_epochs=2) == 4
    assert steps(8, num_epochs=3) == 6


def test_a_schedule_ends_with_the_last_update_of_the_run():
    c = cluster(mini_batch_size=2, actor_optimizer=OptimConfig(lr=1e-3, schedule="linear"))
    run = learner(c).train(rows(8))  # 2 steps of 2 updates: rates of 4/4, 3/4, 2/4, 1/4
    assert [row["learning_rate"] for row in run.rows] == pytest.approx([0.75e-3, 0.25e-3])


def test_the_time_between_saves_starts_anew_with_each(tmp_path):
    class Slow(GRPOLearner):
        def after_step(self, run, step):
            run.saved_at -= 1000 * (step.index == 1)  # as if the first step had taken as long
            super().after_step(run, step)

    options = CheckpointingOptions(save_interval_s=900, max_to_keep=9)
    c = cluster(run_dir=str(tmp_path), checkpointing_options=options)
    Slow(c, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=2)).train(rows(6))
    saved = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-000001", "step-000003"]  # the last one because the run ended


def test_rows_left_over_are_dropped_and_said_or_make_a_smaller_step(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="whet")
    made = learner()
    seen = prompts_of(made, monkeypatch)
    assert made.train(rows(6)).step == 1 and seen == [[0, 1, 2, 3]]
    assert any("2" in m and "drop" in m for m in caplog.messages), caplog.messages
    made = learner(cluster(last_batch="keep"))
    seen = prompts_of(made, monkeypatch)
    run = made.train(rows(6))
    assert run.step == 2 and seen == [[0, 1, 2, 3], [4, 5]]
    assert [row["prompts/count"] for row in run.rows] == [4.0, 2.0]


def test_a_short_last_step_has_a_smaller_last_mini_batch():
    made = learner(cluster(last_batch="keep", mini_batch_size=2))
    assert made.train(rows(7)).step == 2
    assert made.cluster.actor_trainer.train_steps == 4  # 2, 2 | 2, 1


def test_rows_are_shuffled_anew_in_each_epoch_by_the_seed(monkeypatch):
    orders = []
    for training in ({"seed": 1}, {"seed": 2, "data_shuffle_seed": 1}, {"seed": 2}):
        made = learner(cluster(num_epochs=2, **training), data={"shuffle": True})
        seen = prompts_of(made, monkeypatch)
        made.train(rows(8))
        flat = [row for step in seen for row in step]
        assert sorted(flat[:8]) == sorted(flat[8:]) == list(range(8)) and flat[:8] != flat[8:]
        orders.append(flat)
    assert orders[0] == orders[1] != orders[2]


def test_the_epoch_counts_passes_over_the_data():
    run = learner(cluster(num_epochs=2)).train(rows(9))  # 2 batches of 4, a row left over
    assert [row["epoch"] for row in run.rows] == [0.5, 1.0, 1.5, 2.0]


def test_streams_and_ready_made_batches_are_taken_as_they_come(monkeypatch):
    made = learner()
    seen = prompts_of(made, monkeypatch)
    assert made.train(iter(rows(8))).step == 2 and seen == [[0, 1, 2, 3], [4, 5, 6, 7]]

    answers = []

    def reward(completions, answer, **_):
        answers.extend(answer)
        return length_reward(completions)

    batches = [{"prompts": [f"{i}=", f"{i}+"], "answer": np.array([i, -i])} for i in range(3)]
    made = learner(reward=reward, data={"batch_size": 8})  # the batches' own size holds
    assert [row["prompts/count"] for row in made.train(batches).rows] == [2.0, 2.0, 2.0]
    assert answers == [0, 0, 0, 0, 1, 1, -1, -1, 2, 2, -2, -2]


def test_prompts_over_the_limit_end_the_run_before_it_starts_unless_they_may_be_dropped():
    long = [*rows(7), {"prompt": "x" * 100}]
    with pytest.raises(
        DataError, match=r"1 of 8 rows is over rollout\.max_prompt_length 64: the longest has 100 tokens"
    ):
        learner().train(long)
    assert learner(cluster(rollout={"on_long_prompt": "drop"})).train(long).step == 1
    with pytest.raises(DataError):
        learner(cluster(rollout={"on_long_prompt": "drop", "max_prompt_length": 2})).train(rows(4))


@pytest.mark.parametrize("kind", ["rows", "batches", "stream"])
def test_the_first_prompt_is_shown_once_as_the_model_is_given_it(kind, caplog):
    caplog.set_level("INFO", logger="whet")
    data = {
        "rows": rows(4),
        "batches": [{"prompts": ["0+1=", "1+1="], "answer": [1, 2]}],
        "stream": (row for row in rows(4)),
    }[kind]
    made = learner(data={"apply_chat_template": True, "system_prompt": "Be brief."})
    made.new_run(data)
    (shown,) = [m for m in caplog.messages if m.startswith("first prompt")]
    assert shown.splitlines() == [
        "first prompt, row 0: 42 tokens",
        "  | <|im_start|>system\\n",
        "  | Be brief.<|im_end|>\\n",
        "  | <|im_start|>user\\n",
        "  | 0+1=<|im_end|>\\n",
        "  | <|im_start|>assistant\\n",
        "  chat template: from the tokenizer",
        "  system prompt: from data.system_prompt",
    ]


@pytest.mark.parametrize("where", ["train", "eval"])
def test_prompts_that_can_never_fit_the_model_end_the_run_before_it_starts(tmp_path, where):
    def started(data, **rollout):
        called.clear()
        made = learner(cluster(run_dir=str(tmp_path / "run"), rollout=rollout), reward=reward)
        made.train(*((data, None) if where == "train" else (rows(4), data)))

    def reward(completions, **_):
        called.append(1)
        return length_reward(completions)

    called = []
    long = [*rows(5), {"prompt": "x" * 121}, *rows(2)]  # 121 + 8 > 128
    with pytest.raises(DataError, match=r"row 5: 121 prompt.*\.max_tokens_to_generate 8 = 129.*128 positions"):
        started(long, max_prompt_length=125)
    with pytest.raises(DataError, match=r"to_generate leaves no room .* set it to 12\d or less"):
        started(rows(4), max_tokens_to_generate=10**8)
    other = byte_tokenizer()
    other.add_tokens(["<odd>"] + [f"<{i}>" for i in range(9)])
    odd = [*rows(3), {"prompt": "<8>"}]
    with pytest.raises(DataError, match="row 3: token 268 is outside the model's vocabulary of 264"):
        made = learner(cluster(tokenizer=other, run_dir=str(tmp_path / "run")), reward=reward)
        made.train(*((odd, None) if where == "train" else (rows(4), odd)))
    assert not called and not (tmp_path / "run").exists()


def test_conversations_are_prompts(monkeypatch):
    seen = []

    def reward(prompts, completions, **_):
        seen.append((prompts[0], completions[0]))
        return [float(len(c[0]["content"])) for c in completions]

    chats = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(4)]
    assert learner(cluster(rollout={"max_prompt_length": 64}), reward).train(chats).step == 1
    asked, said = seen[0]
    assert asked == [{"role": "user", "content": "0"}] and said[0]["role"] == "assistant"


# ---- evaluation ----------------------------------------------------------------------------------------------------


def test_the_whole_evaluation_set_is_rolled_out_with_its_own_configuration(monkeypatch):
    modes = []

    def reward(completions, mode, **_):
        modes.append((Mode(mode).value, len(completions)))
        return length_reward(completions)

    c = cluster(eval_every_n_steps=2, max_steps=3, rollout={"eval": {"temperature": 0.0, "max_tokens_to_generate": 3}})
    run = learner(c, reward).train(rows(4), rows(5))
    evals = [row for row in run.rows if row["mode"] == "eval"]
    assert [row["step"] for row in evals] == [0, 2, 3]  # before, every second, and the end
    assert {n for mode, n in modes if mode == "eval"} == {5}  # all of it; greedy, so once each
    assert all(row["completions/max_length"] <= 3 for row in evals)
    assert {"reward", "reward_max", "reward_min"} <= evals[0].keys()
    assert [row["step"] for row in run.rows if row["mode"] == "train"] == [1, 2, 3]


def test_a_data_set_of_several_splits_is_evaluated_on_the_one_that_is_for_it():
    seen = []

    def reward(completions, split, mode, **_):
        seen.append((Mode(mode).value, *set(split)))
        return length_reward(completions)

    splits = {name: rows(4, split=[name] * 4) for name in ("train", "test")}
    learner(reward=reward).train(splits, splits)
    assert set(seen) == {("train", "train"), ("eval", "test")}
    with pytest.raises(DataError, match="2 of them are named for evaluation"):
        learner(reward=reward).train(splits, {**splits, "validation": rows(2)})


def test_evaluation_draws_several_completions_and_reports_the_best():
    two = {Mode.TRAIN: RolloutConfig(temperature=1.0), Mode.EVAL: RolloutConfig(num_generations_eval=3)}
    made = learner(cluster(rollout=two))
    row = made.evaluate(rows(5))
    assert row["completions/tokens"] > 5 and row["prompts/count"] == 5
    assert row["rewards/best_of_3/mean"] >= row["reward"]
    assert made.evaluate(rows(5))["reward"] == row["reward"]  # the same draws at the same step
    assert made.evaluate([{"prompts": ["a", "b"]}])["prompts/count"] == 2


def test_evaluation_moves_neither_the_weights_nor_the_training():
    weights = []
    for eval_ds in (None, rows(3)):
        made = learner(cluster(eval_every_n_steps=1))
        made.train(rows(8), eval_ds)
        weights.append(weights_of(made.cluster.actor.module))
    assert same(*weights)


def test_rewards_that_never_apply_leave_an_evaluation_without_a_score():
    made = learner(reward=lambda completions, **_: [None] * len(completions))
    row = made.evaluate(rows(3))
    assert np.isnan(row["reward"])


def test_evaluation_without_data_is_said_to_have_no_effect(caplog):
    learner(cluster(eval_every_n_steps=2)).train(rows(4))
    assert "eval_every_n_steps=2 has no effect" in caplog.text
    caplog.clear()
    learner(cluster(eval_every_n_steps=2)).train(rows(4), rows(2))
    assert "no effect" not in caplog.text


def test_greedy_training_rollouts_are_refused_and_greedy_evaluation_is_not():
    with pytest.raises(ConfigError, match="all completions of a group are equal"):
        learner(cluster(rollout={"temperature": 0.0}))
    learner(cluster(rollout={"eval": {"temperature": 0.0}}))


# ---- updates ---------------------------------------------------------------------------------------------------------


def test_an_observer_may_sample_between_two_updates_from_the_weights_as_they_are():
    held, said, wanted = [], [], []

    class Asking(Observer):
        def on_update_end(self, run, trainer, metrics):
            other = tiny_model()
            other.load_state_dict(c.actor.module.state_dict())
            for made, found in ((c, said), (cluster(other), wanted)):
                found.append(drawn(made, ["a", "1+"], seed=1))

    c, plain = cluster(mini_batch_size=1, lr=5e-2), cluster(mini_batch_size=1, lr=5e-2)
    update = c.actor_trainer.update
    c.actor_trainer.update = lambda *a, **k: (held.append(c.engine.stats().kv_bytes), update(*a, **k))[1]
    asking = learner(c)
    asking.observers.append(Asking())
    asking.train(rows(4))
    assert said == wanted and len({str(s) for s in said}) > 1
    assert held == [0] * 4  # it rests in every update
    learner(plain).train(rows(4))
    assert same(weights_of(c.actor.module), weights_of(plain.actor.module))


def test_a_learner_that_updates_actor_and_critic_logs_the_numbers_of_each():
    class Both(GRPOLearner):
        def score(self, step):
            step = super().score(step)
            return step.replace(batch=step.batch.replace(values=self.cluster.worker("critic").values(step.batch)))

        def update(self, step, mini):
            step = super().update(step, mini)
            total = torch.from_numpy(step.rewards.total)  # one mini-batch has all groups, in order
            returns = total.float().index_select(0, mini.trajectory)
            found = self.cluster.critic_trainer.update(mini.replace(returns=returns, weights=None))
            critics.append(found)
            return step.log(found)

    critics = []
    algo, data = GRPOConfig(num_generations=2, beta=0.0), DataConfig(batch_size=4, shuffle=False)
    c = cluster(critic=tiny_model(1), critic_optimizer=OptimConfig(lr=3e-4))
    row = Both(c, algo, length_reward, data=data).train(rows(4)).rows[0]
    alone = learner(cluster(), **{"num_generations": 2}).train(rows(4)).rows[0]
    names = ("loss", "grad_norm", "learning_rate", "optim/skipped")
    assert [row[n] for n in names] == [alone[n] for n in names]
    assert [row[f"critic/{n}"] for n in names] == [critics[0][f"critic/{n}"].value for n in names]
    assert row["critic/learning_rate"] == 3e-4 and row["critic/loss"] > 1 > abs(row["loss"])
    assert {n for n in row if n.startswith("critic/")} == critics[0].keys()


def test_an_object_that_logs_gets_every_row():
    class Logger:
        def __init__(self):
            self.rows, self.closed = [], False

        def log(self, step, values):
            self.rows.append((step, values))

        def close(self):
            self.closed = True

    mine = Logger()
    learner(cluster(loggers=[mine], metrics_prefix="run")).train(rows(8))
    assert [step for step, _ in mine.rows] == [1, 2] and mine.closed
    assert any("reward" in name and name.startswith("run/") for name in mine.rows[0][1]), list(mine.rows[0][1])[:5]


# ---- the run folder ------------------------------------------------------------------------------------------------


def test_the_run_folder_holds_everything(tmp_path, tokenizer):
    folder = tmp_path / "run"
    c = cluster(run_dir=str(folder), checkpointing_options=CheckpointingOptions(save_interval_steps=1, max_to_keep=1))
    run = learner(c).train(rows(8, answer=list(range(8))), rows(2))
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
        "checkpoints",
        "completions",
        "config.yaml",
        "config_full.yaml",
        "environment.json",
        "final",
        "metrics.jsonl",
        "model_card.md",
    ]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["mode"]) for row in lines] == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]
    assert [{k: v for k, v in row.items() if v == v} for row in run.rows] == [
        {k: v for k, v in row.items() if v is not None} for row in lines
    ]
    table = pandas.read_parquet(folder / "completions" / "train-000002.parquet")
    assert len(table) == 8 and table.row.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert table.generation.tolist() == [0, 1] * 4 and table.version.unique().tolist() == [1]
    assert table.reward.tolist() == length_reward(table.completion.tolist()) == table["reward/length_reward"].tolist()
    assert np.allclose(table.groupby("row").advantage.sum(), 0, atol=1e-5)
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["latest", "step-000002"]
    from transformers import AutoModelForCausalLM

    final = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert same(weights_of(final), weights_of(c.actor.module))


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = learner().train(rows(4))
    assert list(tmp_path.iterdir()) == [] and run.folder is None


def test_a_reward_that_raises_ends_the_run_and_leaves_what_was_written(tmp_path):
    def reward(completions, **_):
        if len(calls) == 2:
            raise ValueError("no more")
        calls.append(1)
        return length_reward(completions)

    calls = []
    c = cluster(run_dir=str(tmp_path), checkpointing_options=CheckpointingOptions(save_interval_steps=1))
    with pytest.raises(RewardError, match="reward function reward raised ValueError: no more"):
        learner(c, reward).train(rows(16))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert not (tmp_path / "final").exists()
    from whet.storage.run_folder import RunFolder

    RunFolder(tmp_path, resume_step=2).close()  # the lock is free


def test_a_failing_reward_can_count_as_not_applicable():
    def reward(completions, **_):
        raise ValueError("never")

    run = learner(cluster(on_reward_error="none"), reward).train(rows(4))
    assert run.step == 1 and run.rows[0]["grad_norm"] == 0.0


def test_reward_workers_judge_what_is_judged_here_otherwise():
    answered = [{**row, "answer": "2"} for row in rows(4)]
    here = learner(cluster(tiny_model()), "fuzzy_match").train(answered)
    made = learner(cluster(tiny_model(), reward_workers=1), "fuzzy_match")
    there = made.train(answered)
    assert made.reward_manager.workers._workers
    made.close()
    assert not made.reward_manager.workers._workers
    clock = ("time/", "perf/", "memory/")
    kept = [[{k: v for k, v in row.items() if not k.startswith(clock)} for row in run.rows] for run in (here, there)]
    assert kept[0] == kept[1] and here.rows[0].keys() == there.rows[0].keys() >= {"time/rewards/fuzzy_match"}


def test_a_run_of_the_same_seed_is_the_same_and_of_another_is_not():
    runs = [learner(cluster(tiny_model(), seed=seed)).train(rows(8)) for seed in (3, 3, 4)]
    completions = [[(row["completions/tokens"], row["reward"]) for row in run.rows] for run in runs]
    weights = [weights_of(run.trainer.worker.module) for run in runs]
    assert same(weights[0], weights[1]) and completions[0] == completions[1]
    assert not same(weights[0], weights[2])


def test_global_generators_are_not_touched():
    made = learner()
    torch.manual_seed(5)
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()
    made.train(rows(4))
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


def test_a_row_says_what_the_engine_ran_and_how_full_its_steps_were():
    made = learner(cluster(rollout={"max_tokens_to_generate": 9, "eos_tokens": (255,)}))
    for row in made.train([{"prompt": "abc" * n} for n in range(1, 9)]).rows:
        assert row["rollout/prefilled_tokens"] == row["rollout/reused_tokens"]  # of two generations, the second reuses
        assert row["rollout/prefilled_tokens"] == row["prompts/count"] * row["prompts/mean_length"]
        assert row["rollout/mean_batch_size"] == pytest.approx(8, abs=2)
