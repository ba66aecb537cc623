"""Preference and reward-model training as a run: learned, resumed, in parts, with its reference read ahead."""

import json
import math

import pytest
import torch
from helpers import exact_model, full, gap, same, tiny_model, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from whet.cli import main
from whet.config import (
    CheckpointingOptions,
    OptimConfig,
    PreferenceConfig,
    RewardModelConfig,
    Role,
    RoleConfig,
    SupervisedDataConfig,
    SupervisedTrainingConfig,
)
from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.learners.preference import PreferenceLearner, RewardModelLearner
from whet.learners.step import ExampleStep
from whet.models.load import load_model, save_model
from whet.ops.preference import PREFERENCE_LOSSES, declared_needs
from whet.train.supervised_models import SupervisedModels

PAIRS = [
    {"prompt": f"{i}+1=", "chosen": f"{i + 1}" * (1 + i % 3), "rejected": f"{i * 7}!" * (1 + i % 2)} for i in range(9)
]
LABELLED = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 3 > 0} for i, r in enumerate(PAIRS)]
NEEDED = {"exo_pair": {"label_smoothing": 0.01}, "alphapo": {"alpha": 0.2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model's."""
    place = tmp_path_factory.mktemp("model")
    save_model(load_model(tiny_model()), byte_tokenizer(), place)
    return str(place)


def loop(run_dir=None, **fields):
    saving = {"checkpointing_options": CheckpointingOptions(save_interval_steps=2), "run_dir": str(run_dir)}
    usual = {"pbar_description": None, "num_epochs": 2, **(saving if run_dir else {})}
    return SupervisedTrainingConfig(**{**usual, **fields})


def learner(name, model, trainer=None, *, lr=0.01, batch_size=3, reference=None, **algo):
    """A learner of a folder, or of what a function makes."""
    c = PreferenceConfig(loss_type=name, **{**NEEDED.get(name, {}), **algo})
    reads = declared_needs(PREFERENCE_LOSSES[name]).reference and not c.reference_free
    make = (lambda: RoleConfig(model=model, optim=OptimConfig(lr=lr))) if isinstance(model, str) else model
    other = reference or ((model if isinstance(model, str) else make()) if reads else None)
    models = SupervisedModels(actor=make(), reference=other, tokenizer=byte_tokenizer(), config=trainer or loop())
    return PreferenceLearner(models, c, data=SupervisedDataConfig(batch_size=batch_size))


def reward_learner(model, trainer=None, *, batch_size=4, **algo):
    given = RoleConfig(model=model, optim=OptimConfig(lr=0.01))
    models = SupervisedModels(reward_model=given, tokenizer=byte_tokenizer(), config=trainer or loop())
    return RewardModelLearner(models, RewardModelConfig(**algo), data=SupervisedDataConfig(batch_size=batch_size))


def train_rows(run):
    return [row for row in run.rows if row["mode"] == "train"]


def numbers(run):
    rows = [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in run.rows]
    return [json.dumps(row) for row in rows]


# ---- it learns -------------------------------------------------------------------------------------------------------

TORN = [{"prompt": "x", "chosen": "a", "rejected": "b"}] * 3 + [{"prompt": "x", "chosen": "b", "rejected": "a"}]
ENTROPY = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
"""What the best model of three preferences against one loses."""


def test_a_reward_model_learns_what_can_be_learned(folder, tmp_path):
    made = reward_learner(folder, loop(tmp_path, num_epochs=30))
    run = made.train(TORN, TORN)
    first, *_, last = [row for row in run.rows if row["mode"] == "eval"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the score head starts at 0
    assert last["loss"] == pytest.approx(ENTROPY, abs=2e-3) and last["accuracy"] == 0.75
    assert last["max_reward"] - last["min_reward"] == pytest.approx(math.log(3), abs=0.1)
    final = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final", num_labels=1)
    tokens = [torch.tensor([[*b"x", *text, 256]]) for text in (b"a", b"b")]
    apart = [final(ids).logits.item() for ids in tokens]
    assert apart[0] - apart[1] == pytest.approx(math.log(3), abs=0.1)


@pytest.mark.parametrize(
    ("name", "algo", "best"),
    [
        ("sigmoid", {"beta": 0.5}, ENTROPY),
        ("ipo", {"beta": 0.5}, 0.75),  # the mean difference d of both answers per token: (d - 1)² thrice, (d + 1)² once
        ("kto", {"beta": 1.0}, 0.25),
    ],
)
def test_a_policy_learns_what_can_be_learned(name, algo, best, folder):
    run = learner(name, folder, loop(num_epochs=30), batch_size=4, lr=0.02, **algo).train(TORN)
    losses = [row["loss"] for row in train_rows(run)]
    assert losses[-1] == pytest.approx(best, abs=0.02) and losses[0] > best + 0.05


# ---- a step ----------------------------------------------------------------------------------------------------------


def gradient(made, rows):
    """The gradient and the metrics of one step on rows."""
    encode = made.encoder()
    examples = [encode(row, i) for i, row in enumerate(rows)]
    step = made.score(made.batch(ExampleStep(index=1, examples=examples)))
    trainer = made.models.trainer
    worker, whole = trainer.worker, trainer.add_loss_weights(step.batch)
    found = worker.forward_backward(whole, trainer.loss, **trainer.needs, reductions=trainer.reductions)
    passes = len(worker.micro_batches(whole, None, trainer.needs.get("scores", False)))
    return {n: p.grad for n, p in worker.module.named_parameters()}, made._divide_by_counts(found), passes


def moved():
    """The exact model, some way from its reference."""
    model = exact_model()
    with torch.no_grad():
        g = torch.Generator().manual_seed(2)
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


KINDS = ("aot", "bco_pair", "cpo", "exo_pair", "kto", "orpo", "sigmoid", "simpo")
"""A loss of each way to look at a batch."""


@pytest.mark.parametrize("name", [name if name in KINDS else full(name) for name in sorted(PREFERENCE_LOSSES)])
def test_a_step_in_micro_batches_is_the_step_of_the_whole_batch(name):
    found = []
    for limit in (10_000, 24):
        reference = exact_model() if declared_needs(PREFERENCE_LOSSES[name]).reference else None
        made = learner(name, moved, loop(max_tokens_per_microbatch=limit), reference=reference)
        found.append(gradient(made, PAIRS))
    (whole, metrics, one), (parts, others, several) = found
    assert one == 1 and several > 2
    assert gap(parts, whole) < 1e-10 and max(g.abs().max() for g in whole.values()) > 1e-4
    assert metrics.keys() == others.keys() and {"rewards/margins", "mean_token_accuracy"} <= metrics.keys()
    for metric, value in metrics.items():
        assert others[metric].value == pytest.approx(value.value, abs=1e-9), metric


def test_labelled_rows_and_pairs_are_the_same_rows_to_a_loss_of_labels():
    pairs = [row for row in PAIRS if row["chosen"] != row["rejected"]]
    apart = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    make = lambda: learner("apo_zero_unpaired", moved, reference=exact_model())
    (a, m, _), (b, n, _) = gradient(make(), pairs), gradient(make(), apart)
    assert gap(a, b) < 1e-12 and m["loss"].value == pytest.approx(n["loss"].value)


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "algo"),
    [
        ("sigmoid", {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}),
        pytest.param("bco", {}, marks=pytest.mark.full),
        ("kto", {}),
        pytest.param("sigmoid", {"precompute_ref_log_probs": True}, marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_to_the_bit(name, algo, folder, tmp_path):
    rows = PAIRS if name != "kto" else LABELLED
    make = lambda run_dir, **fields: learner(name, folder, loop(run_dir, **fields), **algo)
    whole = make(tmp_path / "whole")
    expected = whole.train(rows, rows[:4])

    class Enough(Exception):
        pass

    def stop(step):
        if step.index == 4:
            raise Enough
        return update(step)

    broken = make(tmp_path / "broken")
    update = broken.update
    broken.update = stop
    with pytest.raises(Enough):
        broken.train(rows, rows[:4])
    resumed = make(tmp_path / "broken", resume="latest")
    run = resumed.train(rows, rows[:4])
    assert numbers(run) == numbers(expected) and len(train_rows(run)) == 6
    assert resumed.state() == whole.state() and bool(whole.state()["running"]) == (name in ("bco", "kto"))
    assert same(weights_of(resumed.models.trained.module), weights_of(whole.models.trained.module))
    if algo.get("sync_ref_model"):
        module = resumed.models.worker(Role.REFERENCE).module
        assert same(weights_of(module), weights_of(whole.models.worker(Role.REFERENCE).module))
        assert gap(weights_of(module), weights_of(tiny_model())) > 1e-4


def test_the_reference_moves_where_that_is_due_and_as_far_as_is_said(folder):
    made = learner("sigmoid", folder, loop(num_epochs=None, max_steps=3), sync_ref_model=True, ref_model_sync_steps=2)
    reference, seen, load = made.models.worker(Role.REFERENCE), [], made.models.worker(Role.REFERENCE).load_weights

    def taking(weights, mixup_alpha):
        before, policy = weights_of(reference.module), weights_of(made.models.trained.module)
        load(weights, mixup_alpha)
        after = weights_of(reference.module)
        seen.append((made.models.trained.version, gap(after, {n: 0.4 * before[n] + 0.6 * policy[n] for n in policy})))

    reference.load_weights = taking
    made.train(PAIRS)
    assert [step for step, _ in seen] == [2] and seen[0][1] < 1e-6


def test_a_mismatched_row_fits_the_model_and_a_sides_metrics_are_of_its_rows(folder):
    made = learner("kto", folder)
    rows = [{**LABELLED[1], "prompt": "a" * 100}, *LABELLED[4:7], {**LABELLED[3], "completion": "b" * 90}]
    step = made.score(made.batch(ExampleStep(index=1, examples=[made.encoder()(row, i) for i, row in enumerate(rows)])))
    batch = step.batch
    turned = made._passes(batch).mismatched
    assert (turned.lengths + turned.prefix_lengths[turned.prefix_of]).max() == made.models.positions == 128
    logprobs = made.models.trained.logprobs(batch).logprobs
    found = made.measure(ExampleStep(index=1, examples=step.examples)).metrics
    for side, label in (("chosen", 1.0), ("rejected", 0.0)):
        own = [
            float(logprobs[batch.sequence == i].sum()) for i in range(5) if batch.sequence_columns["label"][i] == label
        ]
        assert len(own) in (2, 3) and found[f"logps/{side}"].value == pytest.approx(sum(own) / len(own), rel=1e-5)


def test_a_reference_read_ahead_gives_the_run_that_it_gives_in_each_step(folder):
    plain, ahead = learner("sigmoid", folder), learner("sigmoid", folder, precompute_ref_log_probs=True)
    alike = [*PAIRS, {**PAIRS[0], "prompt": "what?"}]  # the same answers to another prompt
    runs = [made.train(alike, PAIRS[:4]) for made in (plain, ahead)]
    for a, b in zip(*(run.rows for run in runs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    assert gap(*(weights_of(made.models.trained.module) for made in (plain, ahead))) < 1e-3
    assert next(ahead.models.worker(Role.REFERENCE).module.parameters()).device.type == "meta"
    with pytest.raises(ConfigError, match="these rows were not there when the reference was read"):
        ahead.evaluate([{"prompt": "9", "chosen": "1", "rejected": "2"}])


def test_an_evaluation_is_of_all_rows_and_moves_nothing(folder):
    made = learner("bco", folder, batch_size=4)
    run = made.train(PAIRS)
    before = made.state()
    assert before["running"]["bco_rewards"] == 4 * len(PAIRS)  # two sides, two epochs
    found = made.evaluate(PAIRS)
    assert made.state() == before and found["rows/count"] == len(PAIRS)
    assert set(found) >= {"loss", "rewards/accuracies", "logps/chosen"} and len(train_rows(run)) == 6


def test_a_lone_row_has_the_kl_of_the_step_before(folder):
    made = learner("kto", folder, loop(num_epochs=1), batch_size=4, lr=0.05)
    run = made.train(LABELLED)  # 4, 4, 1
    kl = [row["kl"] for row in train_rows(run)]
    assert kl[0] == 0 and kl[2] == kl[1] == made.state()["running"]["kto_kl"]


def test_labels_without_contrast_are_told(folder, caplog):
    good = [{**row, "label": True} for row in LABELLED[:3]]
    learner("kto", folder).new_run(good)
    assert "all 3 answers are labelled True: algo.loss_type=kto learns from good answers against bad" in caplog.text
    caplog.clear()
    run = learner("kto", folder).new_run(LABELLED)
    assert "labelled" not in caplog.text
    assert run.task.expected_metrics() == ("loss", "rewards/accuracies")
    with pytest.raises(DataError, match=r"there is 1 row to train on, and algo\.loss_type=kto measures a KL"):
        learner("kto", folder).new_run(good[:1])
    with pytest.raises(ConfigError, match=r"data.batch_size=1: algo.loss_type=kto .*a step needs two rows"):
        learner("kto", folder, batch_size=1)


def test_what_does_not_fit_is_refused(folder):
    models = lambda **roles: SupervisedModels(tokenizer=byte_tokenizer(), config=loop(), **roles)
    with pytest.raises(ConfigError, match="loss_type=sigmoid compares with a reference, and there is none"):
        PreferenceLearner(models(actor=folder))
    with pytest.raises(ConfigError, match=r"would be loaded and never read: algo\.loss_type=simpo compares with none"):
        PreferenceLearner(models(actor=folder, reference=folder), PreferenceConfig(loss_type="simpo"))
    with pytest.raises(ConfigError, match="preference training trains a policy"):
        PreferenceLearner(models(reward_model=folder))
    with pytest.raises(ConfigError, match="training a reward model needs one"):
        RewardModelLearner(models(actor=folder))
    with pytest.raises(ConfigError, match="can't know the mismatched rows of each step"):
        learner("kto", folder, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="a stream has no end that is known"):
        learner("sigmoid", folder, loop(max_steps=1, num_epochs=None), precompute_ref_log_probs=True).train(iter(PAIRS))


def test_a_run_says_what_a_step_reads(folder):
    assert learner("sigmoid", folder).planned_passes(3)["ref_logprobs"] == "runs: the loss compares with them"
    assert learner("simpo", folder).planned_passes(3)["ref_logprobs"].startswith("skipped")
    assert "mismatched rows" in learner("kto", folder).planned_passes(3)
    assert "policy before the update" in learner("aot", folder).planned_passes(3)


def test_whet_dpo_and_whet_rm_train_folders_that_transformers_loads(folder, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = [f"model={folder}", f"data={tmp_path / 'pairs.jsonl'}", "data.batch_size=4", "trainer.num_epochs=2"]
    run = lambda name, *more: main([name, *words, f"trainer.run_dir={tmp_path / name}", *more])
    assert run("dpo", "data.eval_fraction=0.2", "actor.lr=1e-2", "actor.dtype=float32") == 0
    found = json.loads((tmp_path / "dpo" / "summary.json").read_text())
    assert found["eval_loss_before"] == pytest.approx(math.log(2), abs=1e-6)
    assert found["eval_loss_after"] < 0.69
    environment = json.loads((tmp_path / "dpo" / "environment.json").read_text())
    assert environment["passes"]["loss"] == "sigmoid(beta=0.1, label_smoothing=0.0)"
    AutoModelForCausalLM.from_pretrained(tmp_path / "dpo" / "final")
    assert run("rm", "reward_model.lr=1e-2", "reward_model.dtype=float32") == 0
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm" / "final", num_labels=1)
    capsys.readouterr()
    assert main(["dpo", *words, "algo.loss_type=simpo", "algo.discopop_tau=0.2"]) == 2
    assert "algo.discopop_tau=0.2 has no effect without algo.loss_type=discopop" in capsys.readouterr().err
    assert main(["dpo", *words, "algo.loss_type=simpo", f"reference.model={folder}"]) == 2
    assert "would be loaded and never read" in capsys.readouterr().err
