"""What a row of metrics says of a run that goes wrong: each symptom by itself, once, and again where it got worse."""

import math
import re
from pathlib import Path

import pytest
from helpers import cluster, completion, length_reward, prompt, rows

from whet.config import DataConfig, GRPOConfig, RLTrainingConfig
from whet.learners.diagnostics import FIRST_STEPS
from whet.learners.grpo import GRPOLearner
from whet.learners.step_metrics import completion_metrics
from whet.learners.symptoms import (
    BANDS,
    SHORTEN_PROMPTS,
    SYMPTOMS,
    find_out_of_band,
    find_sampler_mismatch,
    find_truncation,
    symptoms,
)
from whet.rewards.manager import RewardManager
from whet.types import Group

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def test_most_completions_cut_and_how_many_of_those_scored():
    assert (
        find_truncation({})
        is find_truncation({"completions/clipped_ratio": 0.5})
        is find_truncation({"completions/clipped_ratio": math.nan})
        is None
    )
    row = {"completions/clipped_ratio": 0.75, "completions/clipped_scored_ratio": 0.02}
    found = find_truncation({**row, "completions/max_length": 512.0})
    assert found.message.startswith(
        "75% of completions were truncated, at 512 tokens, and 2% of those had a reward above 0; raise "
    )
    assert "rollout.max_tokens_to_generate" in found.message and found.severity == 0.75
    assert find_truncation(row, more_room=SHORTEN_PROMPTS, can_set_template=False, can_set_eos=False).message.endswith(
        f"had a reward above 0; {SHORTEN_PROMPTS}"
    )
    assert find_truncation(row, can_set_template=False).message.endswith(
        "; if the model never ends a completion by itself, give it its end token (rollout.eos_tokens)"
    )


def test_how_many_of_those_cut_scored_is_counted_over_them():
    def judge(completions):
        return [1.0, 0.0, None, 5.0, 1.0, -1.0]

    ends = ("length", "length", "length", "stop"), ("length", "length")
    groups = [
        Group(prompt=prompt("a"), completions=tuple(completion([i + 1], i, finish=end) for i, end in enumerate(ended)))
        for ended in ends
    ]
    rewarded = RewardManager(judge)(groups, [["x"] * len(ended) for ended in ends])
    metric = completion_metrics(rewarded)["completions/clipped_scored_ratio"]
    assert (metric.sum, metric.count) == (2.0, 5)


def test_sampler_and_trainer_that_drift_apart():
    assert find_sampler_mismatch({}) is find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 0.05}) is None
    found = find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 0.3})
    assert found.message.startswith("sampler and trainer are 0.3 nats apart") and found.severity == 0.3


@pytest.mark.parametrize(
    ("engine", "dtype", "helps"),
    [
        ("embedded", "bfloat16", ["actor.dtype=float32", "algo.sampler_is=token"]),
        ("vllm", "bfloat16", ["rollout_engine=embedded", "actor.dtype=float32", "algo.sampler_is=token"]),
        ("vllm", "float32", ["rollout_engine=embedded", "algo.sampler_is=token"]),
    ],
)
def test_the_distance_of_sampler_and_trainer_names_what_runs_and_no_key_that_is_set_already(engine, dtype, helps):
    message = find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 0.3}, engine=engine, dtype=dtype).message
    assert f"({engine} engine, {dtype})" in message
    assert re.findall(r"[a-z_.]+=\w+", message) == helps


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        ("kl", 0.8, r"kl is 0\.8, above 0\.5; .*algo\.beta.*trainer\.warn_when\.kl\.above"),
        ("entropy/token_mean", 0.01, r"is 0\.01, below 0\.02; .*temperature.*stop_when\.entropy/token_mean\.below"),
        ("entropy/token_mean", 7.0, r"is 7, above 6; .*lower rollout\.temperature"),
    ],
)
def test_kl_and_entropy_that_leave_their_bands(metric, value, said):
    found = find_out_of_band({metric: value}, metric=metric, band=BANDS[metric])
    assert re.search(said, f"{found.message}; {found.fix}")
    inside = {"kl": 0.5, "entropy/token_mean": 0.02}[metric]
    for fine in ({}, {metric: math.nan}, {metric: inside}):
        assert find_out_of_band(fine, metric=metric, band=BANDS[metric]) is None


def test_bands_of_the_configuration_take_the_place_of_the_usual_ones():
    bands = RLTrainingConfig(warn_when={"kl": {"above": 2.0}, "grad_norm": {"above": 9.0, "steps": 2}}).warn_when
    found = symptoms(bands)
    assert found.keys() == {*SYMPTOMS, "kl", "entropy/token_mean", "grad_norm"} and found["grad_norm"].steps == 2
    assert found["kl"].find({"kl": 1.0}) is None and found["kl"].find({"kl": 3.0})


def test_a_run_says_them(caplog):
    made = cluster(engine="mock", max_steps=2, warn_when={"completions/mean_length": {"above": 1.0}})
    algo, data = GRPOConfig(num_generations=2, beta=0.0), DataConfig(batch_size=2)
    GRPOLearner(made, algo, length_reward, data=data).train(rows(4))
    assert sum("completions/mean_length is" in m for m in caplog.messages) == 1


def test_the_page_shows_every_symptom_with_its_bound():
    page = PAGE.read_text()
    table = [line for line in page.splitlines() if line.startswith("| `")]
    named = {re.match(r"\| `([^`]+)`", line)[1] for line in table}
    assert {*SYMPTOMS, *BANDS, *FIRST_STEPS} <= named
    for metric, band in BANDS.items():
        (line,) = [line for line in table if line.startswith(f"| `{metric}`")]
        bounds = [f"{side} {bound:g}" for side, bound in (("below", band.below), ("above", band.above)) if bound]
        assert all(bound in line for bound in bounds) and f"{band.steps} steps" in line


def test_the_page_has_the_words_that_a_run_says():
    page = " ".join(PAGE.read_text().split())
    row = {"completions/clipped_ratio": 0.84, "completions/clipped_scored_ratio": 0.07, "completions/max_length": 12.0}
    said = [
        find_truncation(row),
        find_sampler_mismatch({"sampling/sampling_logp_difference/mean": 0.3}),
        find_out_of_band({"kl": 54.8}, metric="kl", band=BANDS["kl"]),
        find_out_of_band({"entropy/token_mean": 0.012}, metric="entropy/token_mean", band=BANDS["entropy/token_mean"]),
        find_out_of_band({"entropy/token_mean": 7.1}, metric="entropy/token_mean", band=BANDS["entropy/token_mean"]),
    ]
    messages = [found.message.split("; trainer.stop_when")[0] for found in said if found]
    assert len(messages) == 5 and [message for message in messages if message not in page] == []
