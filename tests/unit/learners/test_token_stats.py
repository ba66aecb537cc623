"""The values of single tokens that an update gives to the files of completions."""

import logging

import numpy as np
import pandas
import pytest
import torch
from helpers import cluster, rows, same, tiny_model, weights_of

from whet.config import DataConfig, GRPOConfig, RLTrainingConfig
from whet.learners.grpo import GRPOLearner
from whet.learners.token_stats import TokenStatsRecorder
from whet.types import LossInputs, TokenBatch


def train(folder, *, lr=1e-2, steps=1, algo=None, **training):
    """A run of steps with 4 prompts and 2 completions each. Returns: the learner, its rows, its completions by step."""
    config = {"token_stats_every_n_steps": 1, "max_steps": steps, "run_dir": str(folder), **training}
    made = cluster(tiny_model(), lr=lr, **config)
    algo = GRPOConfig(beta=0.0, num_generations=2, **(algo or {}))
    reward = lambda completions, prompts, **_: [
        float(len(c)) if p[0] != "2" else 1.0 for c, p in zip(completions, prompts, strict=True)
    ]
    learner = GRPOLearner(made, algo, reward, data=DataConfig(batch_size=4, shuffle=False))
    run = learner.train(rows(4 * steps))
    tables = [pandas.read_parquet(folder / f"completions/train-{s + 1:06d}.parquet") for s in range(steps)]
    return learner, run, tables


def test_they_are_those_of_a_pass_of_the_trained_model(tmp_path, monkeypatch):
    """Weights that do not move, four updates: each token has its logprob and entropy, except those that are not run."""
    batches = []
    after_step = GRPOLearner.after_step
    monkeypatch.setattr(
        GRPOLearner, "after_step", lambda self, run, step: (batches.append(step.batch), after_step(self, run, step))[1]
    )
    learner, _, (table,) = train(tmp_path, lr=0.0, mini_batch_size=2, algo={"num_iterations": 2})
    stats = learner.cluster.actor.logprobs(batches[0], entropy=True)
    runs = table.advantage.to_numpy() != 0
    assert runs.any() and not runs.all()
    ends = batches[0].ends.tolist()
    for i, (start, end) in enumerate(zip([0, *ends], ends)):
        for name, column in (("trainer_logprobs", stats.logprobs), ("entropy", stats.entropy)):
            expected = column[start:end].numpy() if runs[i] else np.full(end - start, np.nan)
            np.testing.assert_allclose(table[name][i], expected, rtol=1e-4, atol=1e-4)
        assert np.unique(table.advantages[i]).tolist() == pytest.approx([table.advantage[i]])
        assert table.versions[i].tolist() == [0] * (end - start)
        assert (table.turn_starts[i].tolist(), table.turn_ends[i].tolist()) == ([0], [end - start])


def test_recording_changes_no_weight_and_is_off_by_its_key(tmp_path):
    learner, run, tables = train(tmp_path / "on", steps=2, token_stats_every_n_steps=2)
    assert tables[0].entropy.isna().all() and not tables[1].entropy.isna().any()
    values = np.concatenate([e[~np.isnan(e)] for e in tables[1].entropy])
    assert values.mean() == pytest.approx(run.train_rows[-1]["entropy/token_mean"], rel=1e-4)
    off, _, tables = train(tmp_path / "off", steps=2, token_stats_every_n_steps=0)
    assert tables[1].trainer_logprobs.isna().all() and tables[1].advantages.isna().all()
    assert same(weights_of(learner.cluster.actor.module), weights_of(off.cluster.actor.module))


def test_they_end_where_the_folder_is_as_large_as_its_limit(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "whet"):
        _, _, tables = train(tmp_path, steps=3, token_stats_max_mb=0.006)
    stored = [not t.entropy.isna().all() for t in tables]
    assert stored[0] and not stored[2] and caplog.text.count("trainer.token_stats_max_mb sets the limit") == 1


def test_the_parts_of_several_processes_are_put_together():
    def all_gather(own):
        """Two processes, each of which has run a half of the tokens."""
        return [own] if isinstance(own, bool) else [[x[half] for x in own] for half in (slice(5), slice(5, None))]

    one = torch.ones(9, dtype=torch.long)
    batch = TokenBatch(
        prefixes=one[:1], prefix_ends=one[:1], prefix_of=0 * one[:1], ends=9 * one[:1], trajectory_of=0 * one[:1],
        group_of=0 * one[:1],
        token_columns={"tokens": one, "mask": one > 0, "sampler_logprobs": one * 0.0, "versions": one},
    )  # fmt: skip
    recorder = TokenStatsRecorder(RLTrainingConfig(run_dir="nowhere", token_stats_every_n_steps=1), all_gather)
    batch = recorder.start(1, batch)
    logprobs = -torch.arange(9.0)
    columns = {"entropy": one * 2.0, "token_columns": batch.token_columns}
    recorder.record(LossInputs(sequence=batch.sequence, mask=batch.mask, logprobs=logprobs, **columns))
    assert recorder.finish(batch).trainer_logprobs.tolist() == logprobs.tolist()
