"""`whet eval` from Python: its numbers, its draws, what it keeps, what it refuses."""

import functools
import json
import logging

import numpy as np
import pandas
import pytest
import torch
from helpers import cluster, tiny_model
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from whet import Sampler, evaluate
from whet.config import GRPOConfig
from whet.errors import CheckpointError, ConfigError, DataError, RewardError
from whet.evaluation.evaluator import Evaluator
from whet.evaluation.metrics import resolve_answer_fn
from whet.learners.grpo import GRPOLearner
from whet.rewards.text import boxed

ROWS = [{"prompt": f"{i}+1=", "answer": str(i), "data_source": "ab"[i % 2]} for i in range(7)]
DRAWN = {
    "num_generations": 4,
    "temperature": 1.0,
    "max_tokens": 6,
    "seed": 5,
    "rollout": {"eos_tokens": tuple(range(100))},
}


def even(completions):
    """1 for texts of an even number of characters."""
    return [float(len(text) % 2 == 0) for text in completions]


even.answer_fn = lambda text: len(text) % 2


@pytest.fixture(scope="module")
def tiny():
    return tiny_model(num_hidden_layers=1)


@pytest.fixture
def measured(tiny):
    def call(data=ROWS, reward=even, **keys):
        keys = {**DRAWN, **keys, "rollout": {**DRAWN["rollout"], **keys.get("rollout", {})}}
        return evaluate(tiny, data, reward, tokenizer="byte", **keys)

    return call


def values(found):
    return {name: (one.value, one.se, one.prompts) for name, one in found.results.items()}


def test_the_numbers_are_those_of_the_completions(measured, tmp_path):
    found = measured(out=str(tmp_path / "e"))
    kept = pandas.concat(pandas.read_parquet(p) for p in sorted((tmp_path / "e" / "completions").iterdir()))
    right = kept.completion.str.len() % 2 == 0
    assert kept["reward/even"].tolist() == kept.reward.tolist() == right.astype(float).tolist()
    each = right.groupby(kept.row).sum()
    assert 0 < each.sum() < 28
    assert found["pass@1"].value == pytest.approx(each.mean() / 4)
    assert found["pass@4"].value == (each > 0).mean()
    assert found["pass@1"].se == pytest.approx((each / 4).std(ddof=1) / 7**0.5)
    assert found["majority@4"].value == pytest.approx(np.select([each > 2, each == 2], [1.0, 0.5], 0.0).mean())
    lengths, truncated = kept.tokens.map(len), kept.finish_reason == "length"
    assert found["tokens"].value == pytest.approx(lengths.mean()) and found["truncated"].value == pytest.approx(
        truncated.mean()
    )
    assert 0 < truncated.mean() < 1
    written = json.loads((tmp_path / "e" / "results.json").read_text())
    assert written["results"]["pass@1"]["value"] == found["pass@1"].value and written["majority_of"] == "even"
    assert written["passes"] == {"reward": "total", "at_least": 1.0}


def test_the_breakdown_is_each_sources_own(measured):
    found = measured()
    assert [found.by_source[source]["reward"].prompts for source in "ab"] == [4, 3]
    for name in ("reward", "pass@2", "majority@4", "tokens", "truncated"):
        a, b = (found.by_source[source][name].value for source in "ab")
        assert found[name].value * 7 == pytest.approx(4 * a + 3 * b) and (a != b or name == "truncated")
    assert measured(source_column="answer").by_source.keys() == set("0123456")
    rows = [{k: v for k, v in row.items() if k != "data_source"} for row in ROWS]
    assert measured(rows).by_source == {}
    rows[3]["source"] = "c"
    assert measured(rows).by_source.keys() == {"(none)", "c"}


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_numbers_are_the_same_at_any_batch_size(measured, batch_size, monkeypatch):
    shown = []
    monkeypatch.setattr("whet.observe.Progress.update", lambda self, step, *, value, **_: shown.append((step, value)))
    whole, parts = measured(), measured(batch_size=batch_size)
    assert shown[-1] == (7, pytest.approx(whole["reward"].value))  # so far, not of the last batch
    assert values(whole) == values(parts)
    assert {s: {n: e.value for n, e in f.items()} for s, f in whole.by_source.items()} == {
        s: {n: e.value for n, e in f.items()} for s, f in parts.by_source.items()
    }


def test_a_signal_in_the_last_batch_loses_no_result(measured, monkeypatch):
    whole = measured()
    monkeypatch.setattr(Evaluator, "run", functools.partialmethod(Evaluator.run, should_stop=lambda: True))
    with pytest.raises(KeyboardInterrupt, match="stopped after 5 of 7 prompts"):
        measured(batch_size=5)
    try:
        assert values(measured()) == values(whole)
    except KeyboardInterrupt as error:  # which would end all tests
        pytest.fail(str(error))


def test_the_draws_are_the_samplers(tiny, measured, tmp_path):
    measured(out=str(tmp_path / "e"))
    kept = pandas.read_parquet(tmp_path / "e" / "completions" / "eval-000000.parquet")
    sampler, ends = Sampler(tiny, "byte"), DRAWN["rollout"]["eos_tokens"]
    drawn = sampler([r["prompt"] for r in ROWS], 6, temperature=1.0, seed=5, num_generations=4, eos_tokens=ends)
    assert kept.completion.tolist() == drawn.text
    own = measured(seed=6, rollout={"seed": 5})
    assert values(own) == values(measured()) != values(measured(seed=6))


def test_a_greedy_evaluation_gives_the_numbers_of_a_runs_own(measured):
    found = measured(temperature=0.0, num_generations=1)
    rollout = {"max_tokens_to_generate": 6, "eos_tokens": tuple(range(100)), "eval": {"temperature": 0.0}}
    made = cluster(tiny_model(num_hidden_layers=1), rollout=rollout)
    row = GRPOLearner(made, GRPOConfig(num_generations=4, beta=0.0), even).evaluate(ROWS)
    assert row["reward"] == row["accuracy"] == pytest.approx(found["pass@1"].value)
    assert row["completions/mean_length"] == pytest.approx(found["tokens"].value)
    assert row["completions/clipped_ratio"] == pytest.approx(found["truncated"].value)


def test_a_run_that_samples_in_its_evaluation_has_pass_at_k():
    rollout = {"max_tokens_to_generate": 6, "eos_tokens": tuple(range(100)), "num_generations_eval": 3}
    made = cluster(tiny_model(num_hidden_layers=1), rollout=rollout)
    row = GRPOLearner(made, GRPOConfig(num_generations=4, beta=0.0), even).evaluate(ROWS)
    assert row["pass@1"] == pytest.approx(row["accuracy"])
    assert row["pass@3"] == pytest.approx(row["rewards/best_of_3/mean"])
    assert row["pass@1"] < row["pass@2"] < row["pass@3"]


def test_what_was_drawn_outlives_a_reward_that_raises_and_is_not_drawn_again(measured, tmp_path, monkeypatch, caplog):
    calls = []

    def fails(completions):
        calls.append(len(completions))
        if len(calls) == 3:
            raise ValueError("no judge")
        return even(completions)

    out = str(tmp_path / "e")
    with pytest.raises(RewardError, match="no judge"):
        measured(reward=fails, batch_size=2, out=out)
    assert calls == [8, 8, 8] and "continue with resume=true" in caplog.text
    there = sorted(p.name for p in (tmp_path / "e" / "completions").iterdir())
    assert there == ["eval-000000.parquet", "eval-000002.parquet", "eval-000004.parquet"]
    drawn = []
    sample = Sampler.sample
    monkeypatch.setattr(
        Sampler, "sample", lambda self, prompts, *a, **k: drawn.append(len(prompts)) or sample(self, prompts, *a, **k)
    )
    again = measured(reward=fails, batch_size=3, out=out, resume=True)
    assert drawn == [1]  # six of seven prompts were there
    assert calls[3:] == [8, 4]  # two parts were judged before by the same function
    monkeypatch.undo()
    whole = measured()
    assert [again[n] for n in ("reward", "pass@4", "tokens")] == [whole[n] for n in ("reward", "pass@4", "tokens")]


def test_other_judges_judge_again(measured, tmp_path, monkeypatch):
    out = str(tmp_path / "e")
    measured(out=out)
    monkeypatch.setattr(Sampler, "sample", None)  # nothing is drawn
    again = measured(reward="last_number", out=out, resume=True)
    assert "rewards/last_number" in again.results and "rewards/even" not in again.results
    kept = pandas.read_parquet(tmp_path / "e" / "completions" / "eval-000000.parquet")
    assert "reward/even" not in kept and kept["reward/last_number"].tolist() == kept.reward.tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.5}, "sampling.temperature: 1.0 -> 0.5"),
        ({"seed": 6}, "seed: 5 -> 6"),
        ({"num_generations": 2}, "num_generations: 4 -> 2"),
        ({"data": ROWS[:3]}, "prompts"),
    ],
)
def test_a_resumed_evaluation_draws_the_same(measured, tmp_path, change, said):
    out = str(tmp_path / "e")
    measured(out=out)
    with pytest.raises(ConfigError, match=said):
        measured(out=out, resume=True, **change)


def test_another_model_is_refused_on_a_resume(measured, tmp_path):
    measured(out=str(tmp_path / "e"))
    other = tiny_model(1, num_hidden_layers=1)
    with pytest.raises(ConfigError, match="weights"):
        evaluate(other, ROWS, even, tokenizer="byte", out=str(tmp_path / "e"), resume=True, **DRAWN)


def test_folders_are_not_mixed(measured, tmp_path):
    measured(out=str(tmp_path / "e"))
    with pytest.raises(ConfigError, match="holds an evaluation; set resume=true"):
        measured(out=str(tmp_path / "e"))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl and no evaluation"):
        measured(out=str(tmp_path / "x"))
    (tmp_path / "e" / "completions" / "eval-000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(CheckpointError, match="not a file of completions"):
        measured(out=str(tmp_path / "e"), resume=True)


def test_a_name_is_not_used_up_by_what_fails_before_a_draw(measured, tmp_path):
    for _ in range(2):
        with pytest.raises(ConfigError, match="did you mean exact_match"):
            measured(reward="exact_macth", out=str(tmp_path / "e"))
    assert measured(out=str(tmp_path / "e")).folder == tmp_path / "e"


def test_greedy_is_one_completion_and_several_are_refused(measured):
    found = measured(temperature=0.0, num_generations=1)
    assert {n for n in found.results if "@" in n} == {"pass@1"}
    with pytest.raises(ConfigError, match=r"temperature=0.0 takes the likeliest token, so 4 generations"):
        measured(temperature=0.0)


def test_rewards_that_are_no_yes_or_no_need_a_threshold(measured, caplog):
    caplog.set_level(logging.INFO)
    length = lambda completions: [len(text) / 4 for text in completions]
    assert not any("@" in n for n in measured(reward=length).results) and "set pass_threshold" in caplog.text
    found = measured(reward=length, pass_threshold=1.0)
    exact = measured(reward=lambda completions: [float(len(text) >= 4) for text in completions])
    assert found["pass@2"] == exact["pass@2"]


def test_one_of_several_rewards_may_decide(measured):
    half = lambda completions: [0.5] * len(completions)
    found = measured(reward=[half, even], pass_reward="even")
    alone = measured()
    assert found["pass@4"] == alone["pass@4"] and found["majority@4"] == alone["majority@4"]
    assert found["reward"].value == pytest.approx(alone["reward"].value + 0.5)
    with pytest.raises(ConfigError, match="unknown pass_reward 'evn'; did you mean even"):
        measured(pass_reward="evn")


def test_weights_come_with_the_names(measured):
    found = measured(reward={"last_number": 2.0, "exact_match": 1.0})
    table = found.results
    assert table["reward"].value == pytest.approx(
        2 * table["rewards/last_number"].value + table["rewards/exact_match"].value
    )


def test_completions_without_a_reward_count_nowhere(measured):
    sometimes = lambda completions: [None if len(t) % 3 == 0 else 1.0 for t in completions]
    found = measured(reward=sometimes)
    assert found["pass@1"].value == 1.0 and found.about["completions_without_reward"] > 0
    assert found["pass@4"].prompts < 7


@pytest.mark.parametrize(
    ("given", "fns", "text", "answer"),
    [
        (None, [boxed], r"so \boxed{1{,}0}x", "1{,}0"),
        (None, [even], "abc", 1),
        (None, [len], " a ", "a"),
        ("last_number", [even], "2 or 3", 3),
        (str.upper, [], "a", "A"),
    ],
)
def test_what_is_voted_on(given, fns, text, answer):
    assert resolve_answer_fn(given, fns)[0](text) == answer


def test_an_answer_fn_that_fails_is_named(measured):
    with pytest.raises(RewardError, match=r"answer_fn .* failed on a completion of row 0: ZeroDivisionError"):
        measured(answer_fn=lambda text: 1 / 0)
    with pytest.raises(RewardError, match="unhashable"):
        measured(answer_fn=list)
    with pytest.raises(ConfigError, match="unknown answer_fn 'boxd'; did you mean boxed"):
        measured(answer_fn="boxd")


def test_a_reward_model_judges(measured, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = Qwen3Config(vocab_size=264, num_hidden_layers=1, head_dim=8, num_labels=1, pad_token_id=257, **sizes)
    Qwen3ForSequenceClassification(shape).save_pretrained(tmp_path / "rm")
    found = measured(reward={"last_number": 0.0, "reward_model": 1.0}, reward_model={"model": str(tmp_path / "rm")})
    assert found["rewards/rm"] == found["reward"] and found["rewards/rm"].se > 0


def test_the_context_bounds_the_completion(measured, caplog):
    found = measured(max_tokens=1000, limit=2, num_generations=1, rollout={"eos_tokens": [263]})
    assert "2 of 2 prompts leave less than rollout.max_tokens_to_generate=1000 of the 128 tokens" in caplog.text
    assert found["tokens"].value <= 124


@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"rollout": {"max_prompt_length": 2}}, DataError, "over rollout.max_prompt_length 2"),
        ({"rollout": {"max_prompt_length": 2, "on_long_prompt": "drop"}}, DataError, "all 7 prompts are over"),
        ({"reward": None}, ConfigError, "an evaluation needs reward"),
        ({"reward": "exact_macth"}, ConfigError, "did you mean exact_match"),
        ({"k": [8]}, ConfigError, "k=8 needs as many completions"),
        ({"temprature": 1.0}, ConfigError, "unknown key temprature; did you mean temperature"),
        ({"temperature": 0.5, "rollout": {"temperature": 1.0}}, ConfigError, "temperature is given twice"),
        ({"reward": lambda gold: [1.0]}, ConfigError, "gold"),
    ],
)
def test_what_is_wrong_is_said(tiny, keys, error, said):
    given = {"reward": even, "num_generations": 1, "max_tokens": 4, **keys}
    with pytest.raises(error, match=said):
        evaluate(tiny, ROWS, tokenizer="byte", **given)


def test_an_unknown_source_column_names_the_columns(measured):
    with pytest.raises(DataError, match="did you mean data_source"):
        measured(source_column="data_sorce")
