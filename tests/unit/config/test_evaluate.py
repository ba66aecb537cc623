"""What `whet eval` and `whet push` take: defaults, shorthands, a run's file, and what is refused."""

from pathlib import Path

import pytest
import yaml

from whet.config import Mode, RunConfig, dump, load_run
from whet.config.evaluate import EvalRunConfig, check_eval, load_eval
from whet.config.push import PushConfig, check_push, load_push
from whet.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))


def test_shorthands_and_defaults():
    made = load_eval(["model=m", "data=d.jsonl", "limit=5", "num_generations=8", "temperature=0.6", "k=[1, 8]"])
    assert (made.data.path, made.data.limit, made.sampling.num_generations_eval, made.k) == ("d.jsonl", 5, 8, (1, 8))
    assert made.sampling.temperature == 0.6 and made.sampling.max_tokens_to_generate == 1024
    assert EvalRunConfig().sampling.temperature == 0.0


def test_it_can_be_written_and_read(tmp_path):
    made = load_eval(
        ["model=m", "data=d.jsonl", "reward={boxed: 1.0, f.py:g: 0.5}", "k=[2]", "num_generations=2", "temperature=1"]
    )
    (tmp_path / "c.yaml").write_text(dump(made))
    assert load_eval(["--config", str(tmp_path / "c.yaml")]) == made


def run_file(tmp_path, **sections):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections))
    return ["--config", str(tmp_path / "run.yaml")]


def test_a_runs_file_stands_for_its_evaluation(tmp_path):
    words = run_file(
        tmp_path,
        actor={"model": "base", "lr": 1e-5},
        algo={"num_generations": 6, "reward_weights": [1.0, 0.5], "beta": 0.0},
        rollout={"temperature": 0.8, "max_tokens_to_generate": 99, "eval": {"top_p": 0.9}},
        data={"path": "train.jsonl", "eval_path": "test.jsonl", "prompt_column": "q", "batch_size": 128, "limit": 7},
        reward=["boxed", "f.py:g"],
        trainer={"seed": 3, "reward_timeout_s": 5.0, "reward_workers": 2, "max_steps": 10},
    )
    made = load_eval([*words, "model=runs/a", "max_tokens=200"])
    assert (made.model, made.seed, made.reward_timeout_s, made.reward_workers) == ("runs/a", 3, 5.0, 2)
    assert made.reward == {"boxed": 1.0, "f.py:g": 0.5} and made.reward_weights == (1.0, 0.5)
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens_to_generate) == (0.8, 0.9, 200)
    assert sampling.num_generations_eval == 6 and made.rollout.eval == {}
    assert (made.data.path, made.data.prompt_column, made.data.batch_size, made.data.limit) == (
        "test.jsonl",
        "q",
        64,
        None,
    )
    assert load_eval(words).model == "base"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"path": "d", "eval_split": "dev", "limit": 3}, {"path": "d", "split": "dev", "limit": None}),
        ({"path": "d", "eval_path": "e"}, {"path": "e", "split": None}),
        (
            {"path": "d", "eval_path": [{"path": "e", "split": "test", "limit": 3}, "f"]},
            {"path": ({"path": "e", "split": "test", "limit": 3}, "f"), "split": None},
        ),
        (
            {"path": "d", "eval_fraction": 0.1, "limit": 50},
            {"path": "d", "split": "train", "eval_fraction": 0.1, "eval_fraction_seed": 4, "limit": 50},
        ),
        ({"path": "d"}, {"path": None}),  # it has no evaluation data
    ],
)
def test_the_rows_are_those_that_the_run_evaluates_on(tmp_path, data, found):
    made = load_eval(run_file(tmp_path, actor={"model": "m"}, data=data, trainer={"seed": 4}, reward="boxed"))
    assert {name: getattr(made.data, name) for name in found} == found


def test_a_greedy_evaluation_of_a_run_is_of_one_completion(tmp_path):
    words = run_file(
        tmp_path, actor={"model": "m"}, algo={"num_generations": 8}, rollout={"eval": {"temperature": 0.0}}
    )
    assert load_eval(words).sampling.num_generations_eval == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_and_what_a_run_of_it_writes_mean_the_same(recipe, tmp_path):
    if "rollout" not in yaml.safe_load(recipe.read_text()):
        pytest.skip("supervised")
    given = yaml.safe_load(recipe.read_text())
    kind = RunConfig if "critic" not in given and "gae_lambda" not in given.get("algo", {}) else None
    direct = load_eval(["--config", str(recipe), "model=m"])
    if kind is not None:
        run = load_run(["--config", str(recipe)])
        (tmp_path / "config.yaml").write_text(dump(run))
        assert load_eval(["--config", str(tmp_path / "config.yaml"), "model=m"]) == direct
        assert direct.sampling.max_tokens_to_generate == run.rollout.for_mode(Mode.EVAL).max_tokens_to_generate


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.seed=3"], "unknown key trainer"),
        (["num_generations=4"], "temperature=0.0 takes the likeliest token, so 4 generations"),
        (["k=[4]"], "k=4 needs as many completions of each prompt, and there are 1; set num_generations=4"),
        (["resume=true"], "resume=true needs out="),
        (["reward=[boxed, reward_model]"], "reward names reward_model, and there is none"),
        (["data.eval_fraction=1.0"], r"data.eval_fraction must lie in \[0, 1\)"),
        (["pass_treshold=1.0"], "unknown key pass_treshold; did you mean pass_threshold"),
        (["reward_timeout_s=0"], "reward_timeout_s must be positive"),
    ],
)
def test_what_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        load_eval(words)


def test_what_is_missing_is_said_at_once():
    with pytest.raises(ConfigError, match=r"(?s)no model; .*no data; .*no reward; "):
        check_eval(EvalRunConfig())


def test_the_run_of_a_push_may_be_a_word():
    assert load_push(["runs/a", "repo=me/x"]) == load_push(["run=runs/a", "repo=me/x"])
    assert load_push(["--run", "runs/a"]).private is True
    with pytest.raises(ConfigError, match="expected key=value"):
        load_push(["runs/a", "runs/b"])
    with pytest.raises(ConfigError, match="no run; write whet push runs/a"):
        check_push(PushConfig())


def test_data_sets_of_an_evaluation_have_no_weights():
    with pytest.raises(ConfigError, match="data takes no weights in an evaluation"):
        load_eval(["model=m", "reward=boxed", "data=[{path: a, weight: 0.5}, {path: b, weight: 0.5}]"])
