"""docs/run-folder.md explains every metric and file that a run writes."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers import tiny_model
from whet import (
    ClusterConfig,
    GRPOConfig,
    GRPOLearner,
    PPOConfig,
    PPOLearner,
    PreferenceConfig,
    PreferenceLearner,
    RewardModelLearner,
    RLCluster,
    RLTrainingConfig,
    RolloutConfig,
    SFTLearner,
    SupervisedModels,
    SupervisedTrainingConfig,
)

PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
SAID = set(re.findall(r"`([^`\n]+)`", PAGE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run in which everything is on that adds a metric."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    training = RLTrainingConfig(
        run_dir=str(folder), max_steps=2, mini_batch_size=1, eval_every_n_steps=1, pbar_description=None
    )
    rollout = RolloutConfig(max_tokens_to_generate=4, eos_tokens=tuple(range(128)))  # so that some stop
    cluster = RLCluster(
        actor=tiny_model(),
        reference=tiny_model(),
        tokenizer="byte",
        cluster_config=ClusterConfig(rollout_config=rollout, training_config=training),
    )
    algo = GRPOConfig(
        epsilon_c=3.0,
        sampler_is="token",
        advantage_estimator="remax",
        loss_masks=("top-entropy",),
        top_entropy_quantile=0.5,
        target_kl=0.1,
        entropy_coef=0.01,
    )
    rows = [{"prompts": ["1+1=", "2+2="]}]
    GRPOLearner(cluster, algo, reward_fns=lambda completions: [len(c) for c in completions]).train(rows, rows)
    return folder


@pytest.fixture(scope="module")
def with_critic():
    """The rows of a run with a critic."""
    training = RLTrainingConfig(max_steps=2, pbar_description=None)
    rollout = RolloutConfig(max_tokens_to_generate=4)
    config = ClusterConfig(rollout_config=rollout, training_config=training)
    cluster = RLCluster(
        actor=tiny_model(), critic=tiny_model(), reference=tiny_model(1), tokenizer="byte", cluster_config=config
    )
    rows = [{"prompts": ["1+1=", "2+2="]}] * 2
    return PPOLearner(cluster, PPOConfig(), lambda completions: [len(c) for c in completions]).train(rows).rows


@pytest.fixture(scope="module")
def supervised():
    """The rows of supervised runs of every kind, with evaluations."""

    def models(**given):
        loop = SupervisedTrainingConfig(max_steps=1, eval_every_n_steps=1, pbar_description=None)
        return SupervisedModels(**given, tokenizer="byte", config=loop)

    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": "4"}]
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "7"}, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}]
    sft = SFTLearner(models(actor=tiny_model())).train(rows, rows)
    rm = RewardModelLearner(models(reward_model=tiny_model())).train(pairs, pairs)
    across = PreferenceConfig(loss_type="aot")  # a loss that looks across the batch
    dpo = PreferenceLearner(models(actor=tiny_model(), reference=tiny_model()), across).train(pairs, pairs)
    return [*sft.rows, *rm.rows, *dpo.rows]


@pytest.fixture
def written(folder, with_critic, supervised):
    """Names of metrics in the rows of the runs, as the page writes them."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in [*rows, *with_critic, *supervised] for name in row} - {"step", "mode", "version"}
    names -= {name for name in names if name.startswith("critic/") and name.removeprefix("critic/") in names}
    named = {name.replace("/lambda", "/<f>").replace("best_of_2", "best_of_<G>") for name in names}
    return {re.sub(r"pass@\d+", "pass@<k>", name) for name in named}


def test_every_metric_of_a_run_is_explained(written):
    assert len(written) > 60
    assert sorted(written - SAID) == []


def test_every_metric_explained_is_one_of_a_run(written):
    part = PAGE[PAGE.index("## Metrics") : PAGE.index("## Checkpoints")]
    cells = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", part, re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    of_a_loss = {"cispo_clip_ratio", "divergence", "teacher_kl", "vespo/phi_seq_mean"}  # each of one policy loss
    of_turns = {"completions/sampled_tokens", *(f"turns/{name}" for name in ("mean", "max", "min", "forks", "failed"))}
    of_turns |= {"time/rollout/tool_wait", "tools/call_frequency", "tools/failure_frequency", "turns/retried"}
    of_turns |= {"turns/failed_infrastructure", "turns/replaced"}
    of_a_gpu, of_several = {"perf/mfu"}, {"perf/rank_imbalance"}
    of_turns.add("rollout/sync_logprob_gap")  # of an engine with a copy of the weights
    assert listed - written == {
        "rewards/<f>/errors",
        *of_a_loss,
        *of_turns,
        *of_a_gpu,
        *of_several,
    }  # the first only where a function failed


def test_every_file_of_a_run_is_explained(folder):
    assert sorted(p.name for p in folder.iterdir() if p.name not in "".join(SAID)) == []
