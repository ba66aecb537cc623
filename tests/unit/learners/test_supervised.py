"""The loop of supervised training, with SFT on it: what it computes, what it learns, what it refuses."""

import copy
import json
import math

import pytest
import torch
from helpers import tiny_model, weights_of

from whet.cli import main
from whet.config import OptimConfig, PreferenceConfig, SFTConfig, SupervisedDataConfig, SupervisedTrainingConfig
from whet.data.tokenizer import byte_tokenizer
from whet.errors import CheckpointError, ConfigError, DataError
from whet.learners import supervised
from whet.learners.preference import PreferenceLearner, RewardModelLearner
from whet.learners.sft import SFTLearner
from whet.train.supervised_models import SupervisedModels

ROWS = [{"prompt": f"{i}+{i}=", "response": f"{2 * i}" + "!" * (i % 5)} for i in range(24)]
SGD = OptimConfig(name="sgd", lr=0.1, max_grad_norm=0.0)


def learner(model=None, algo=None, *, optim=SGD, data=None, **trainer):
    """An SFTLearner of a tiny model."""
    models = SupervisedModels(
        actor=tiny_model() if model is None else model,
        tokenizer=byte_tokenizer(),
        config=SupervisedTrainingConfig(**{"pbar_description": None, **trainer}),
        optimizer=optim,
    )
    return SFTLearner(models, algo, data=SupervisedDataConfig(**{"batch_size": 4, "shuffle": False, **(data or {})}))


def naive_loss(model, rows, mode="token-mean", dft=False):
    """Row by row through the bare model: every token of the response and its end mark, then the mean."""
    tokenizer, sums, counts = byte_tokenizer(), [], []
    for row in rows:
        prompt, response = (list(row[name].encode()) for name in ("prompt", "response"))
        ids = torch.tensor([[*prompt, *response, tokenizer.eos_token_id]])
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        sums.append((-logprobs * (logprobs.detach().exp() if dft else 1)).sum())
        counts.append(len(logprobs))
    if mode == "token-mean":
        return sum(sums) / sum(counts)
    return sum(s / n for s, n in zip(sums, counts, strict=True)) / len(rows)


@pytest.mark.spread(3)
@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize(
    ("algo", "form"),
    [
        (SFTConfig(), {}),
        (SFTConfig(loss_agg_mode="sequence-mean-token-mean"), {"mode": "sequence"}),
        (SFTConfig(loss_type="dft"), {"dft": True}),
    ],
)
def test_a_step_is_that_of_the_bare_model_row_by_row(algo, form, budget):
    model = tiny_model()
    naive = copy.deepcopy(model)
    loss = naive_loss(naive, ROWS[:4], **form)
    loss.backward()
    torch.optim.SGD(naive.parameters(), lr=0.1).step()
    run = learner(model, algo, max_steps=1, max_tokens_per_microbatch=budget).train(ROWS)
    assert run.rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-5) and run.rows[0]["learning_rate"] == 0.1
    assert run.rows[0]["num_tokens"] == sum(len(row["prompt"] + row["response"]) + 1 for row in ROWS[:4])
    assert run.rows[0]["version"] == 1
    for name, weight in weights_of(naive).items():
        torch.testing.assert_close(weights_of(model)[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_example_is_shown_with_what_of_it_is_trained(stream, caplog):
    caplog.set_level("INFO", logger="whet")
    made = learner()
    made.new_run((row for row in ROWS) if stream else ROWS)
    (shown,) = [m for m in caplog.messages if m.startswith("first example")]
    assert shown.splitlines() == [
        "first example, row 0: 6 tokens, 2 trained (lines with +)",
        "  | 0+0=",
        "  + 0<|im_end|>",
        "  plain text, without a chat template",
    ]


def test_an_evaluation_weighs_all_tokens_alike_however_many_passes_it_takes(monkeypatch):
    monkeypatch.setattr(supervised, "ROWS_AT_ONCE", 5)
    found = learner(max_tokens_per_microbatch=32).evaluate(ROWS)
    assert found["loss"] == pytest.approx(naive_loss(tiny_model(), ROWS).item(), rel=1e-5)
    assert found["nll"] == pytest.approx(found["loss"], rel=1e-5) and found["rows/count"] == len(ROWS)


def test_a_learning_rate_that_is_not_given_is_that_of_the_kind_of_training(caplog):
    caplog.set_level("INFO", "whet")
    rate = lambda made: made.models.trained.optim.optimizer.param_groups[0]["lr"]
    assert rate(learner(optim=None)) == rate(learner(optim=OptimConfig(name="sgd", momentum=0.9))) == 2e-5
    assert "actor: learning rate 2e-05, the default here" in caplog.text
    models = lambda **given: SupervisedModels(tokenizer=byte_tokenizer(), **given)
    assert rate(RewardModelLearner(models(reward_model=tiny_model()))) == 1e-4
    assert rate(PreferenceLearner(models(actor=tiny_model()), PreferenceConfig(loss_type="simpo"))) == 1e-6
    assert rate(learner(optim=OptimConfig(lr=1e-6))) == 1e-6


def test_it_learns_down_to_the_entropy_of_the_data():
    """After "a" comes "x" in three rows of four and "y" in one: the best loss of a row is ln 4 - 3/4 ln 3, and 0 of its
    end mark.
    """
    rows = [{"prompt": "a", "response": "xxxy"[i % 4]} for i in range(32)]
    best = (math.log(4) - 0.75 * math.log(3)) / 2
    optim = OptimConfig(lr=1e-2, schedule="linear")
    run = learner(tiny_model(gain=1.0), optim=optim, data={"batch_size": 16}, max_steps=60).train(rows, rows[:4])
    before, after = (r["loss"] for r in run.rows if r["mode"] == "eval")
    assert before > 3 and best <= after < best + 0.01


def test_the_norm_of_an_aggregation_is_the_trainers():
    made = learner(algo=SFTConfig(loss_agg_mode="sequence-mean-token-sum-norm", loss_agg_norm=3.0))
    assert made.models.trainer.loss_agg_norm == 3.0


def test_entropy_is_logged_where_it_is_asked_for():
    run = learner(algo=SFTConfig(log_entropy=True), max_steps=1).train(ROWS)
    assert 0 < run.rows[0]["entropy"] < math.log(264)
    assert "entropy" not in learner(max_steps=1).train(ROWS).rows[0]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    def train(folder, steps, rows=ROWS, **more):
        made = learner(
            optim=OptimConfig(lr=1e-2, schedule="linear", total_steps=9),
            data={"batch_size": 5, "shuffle": True},
            max_steps=steps,
            eval_every_n_steps=2,
            run_dir=str(folder),
            **more,
        )
        return made, made.train(rows, ROWS[:6])

    whole, one = train(tmp_path / "whole", 9)
    train(tmp_path / "parts", 4)
    parts, two = train(tmp_path / "parts", 9, resume="latest", allow_config_change=True)

    def logged(run):
        ends = [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in run.rows]
        return [r for r in ends if (r["mode"], r["step"]) != ("eval", 4) or r["version"] == 4]

    assert json.dumps(logged(one)) == json.dumps(logged(two))
    for name, weight in weights_of(whole.models.trained.module).items():
        assert torch.equal(weights_of(parts.models.trained.module)[name], weight)
    changed = [{**row, "response": row["response"] + "?"} for row in ROWS]
    with pytest.raises(CheckpointError, match="rows are not those"):
        train(tmp_path / "parts", 9, rows=changed, resume="latest")


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (
            [{"prompt": "a" * 200, "response": "b"}] * 4,
            {},
            r"4 of 4 rows are over the model's max_position_embeddings 128: the longest has 202 .* \(row 0\)",
        ),
        (ROWS, {"max_tokens_per_microbatch": 3}, "max_tokens_per_microbatch=3 is smaller than the longest sequence"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_step(rows, options, said):
    with pytest.raises((DataError, ConfigError), match=said):
        learner(max_steps=1, **options).train(rows)


def test_wrong_configurations_are_named():
    with pytest.raises(ConfigError, match=r"SFT loss 'nl'.*nll"):
        learner(algo=SFTConfig(loss_type="nl"))
    with pytest.raises(ConfigError, match="actor= or reward_model="):
        SupervisedModels(tokenizer=byte_tokenizer())
    with pytest.raises(ConfigError, match=r"data.limit is for the command line"):
        learner(data={"limit": 3})


def test_whet_sft_trains_a_folder_that_transformers_loads(tmp_path, model_folder, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = [f"model={model_folder}", f"data={path}", "data.batch_size=6", "data.eval_fraction=0.25", "actor.lr=1e-2"]
    assert main(["sft", *words, "trainer.num_epochs=8", f"trainer.run_dir={tmp_path / 'run'}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["eval_rows"] == 6
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert main(["sft", *words, "trainer.gradient_accumulation_steps=2"]) == 2
    assert "an update covers all of its rows, however many fit into memory at once" in capsys.readouterr().err


@pytest.mark.parametrize(("lr", "warned"), [(0.0, True), (1e-2, False)])
def test_a_run_that_ends_with_the_loss_of_a_guess_says_so(lr, warned, caplog):
    optim = OptimConfig(lr=lr)
    learner(tiny_model(gain=0.01), optim=optim, max_steps=12, num_epochs=None).train(ROWS)
    assert ("a model that guesses has 5.5" in caplog.text and "raise actor.optim.lr" in caplog.text) is warned
    caplog.clear()
    models = SupervisedModels(
        actor=tiny_model(),
        reference=tiny_model(),
        tokenizer=byte_tokenizer(),
        config=SupervisedTrainingConfig(pbar_description=None, max_steps=12),
        optimizer=optim,
    )
    pairs = [{"prompt": "1+1=", "chosen": str(i), "rejected": "no"} for i in range(8)]
    PreferenceLearner(models, PreferenceConfig(), data=SupervisedDataConfig(batch_size=4)).train(pairs)
    assert ("a model that guesses has 0.6931" in caplog.text) is warned
