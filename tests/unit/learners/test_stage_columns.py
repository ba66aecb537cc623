"""The lines "Reads: ... Writes: ..." of the stages, against what happens in runs of whole learners.

`batch` stands for the columns that every batch has; `batch.x` is a further column. An override lists what it reads and
writes in addition to the stage that it overrides.
"""

import contextlib
import dataclasses
import inspect
import re

from helpers import cluster, length_reward, rows, tiny_model

from whet.config import (
    DataConfig,
    GRPOConfig,
    OptimConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedDataConfig,
    SupervisedTrainingConfig,
)
from whet.data.tokenizer import byte_tokenizer
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.learners.preference import PreferenceLearner, RewardModelLearner
from whet.learners.sft import SFTLearner
from whet.learners.step import BaseStep, ExampleStep, Step
from whet.train.supervised_models import SupervisedModels
from whet.types import LossInputs, TokenBatch
from whet.types.columns import Columns, OptionalColumn

STEP = {f.name for cls in (Step, ExampleStep) for f in dataclasses.fields(cls)}
ALWAYS = {"mask", "sampler_logprobs", "tokens", "versions"}
OWN = {*dir(TokenBatch), *dir(LossInputs), *(f.name for c in (TokenBatch, LossInputs) for f in dataclasses.fields(c))}
"""Names that are no columns of a user's or a learner's."""
RL_STAGES = (
    "sample",
    "reward",
    "select_groups",
    "batch",
    "score",
    "assign_advantages",
    "minibatches",
    "update",
    "after_step",
)
SUPERVISED_STAGES = ("batch", "score", "update", "measure", "after_step")


class Recorder:
    """Records the columns that each stage of a learner reads and writes; of nested stages the inner one."""

    def __init__(self, monkeypatch):
        self.active = []
        self.reads, self.writes = {}, {}
        record = self.read

        def get_field(step, name):
            if name in STEP:
                record(name)
            return object.__getattribute__(step, name)

        def get_column(column, holder, owner):
            if holder is None:
                return column
            found = holder.token_columns.get(column.name)
            if found is not None or isinstance(holder, TokenBatch):
                record(f"batch.{column.name}", found)
            return found

        def get_unknown(holder, name, get=Columns.__getattr__):
            found = get(holder, name)
            record(f"batch.{name}", found)
            return found

        def column(holder, name, get=Columns.column):
            found = get(holder, name)
            if name not in OWN - set(Columns.well_known()):
                record(f"batch.{name}", found)
            return found

        monkeypatch.setattr(BaseStep, "__getattribute__", get_field)
        monkeypatch.setattr(OptionalColumn, "__get__", get_column)
        monkeypatch.setattr(Columns, "__getattr__", get_unknown)
        monkeypatch.setattr(Columns, "column", column)

    def read(self, name, value=None):
        """Records a read. Args: value: of a column; one that the stage has just made itself is not read."""
        if not self.active:
            return
        stage, given = self.active[-1]
        column = name.removeprefix("batch.")
        if column == name or (column not in ALWAYS and (value is None or column in given)):
            self.reads.setdefault(stage, set()).add(name)

    @contextlib.contextmanager
    def stage(self, name, args):
        batches = [vars(a)["batch"] if isinstance(a, BaseStep) else a for a in args]
        self.active.append((name, {c for b in batches if isinstance(b, TokenBatch) for c in columns_of(b)}))
        try:
            yield
        finally:
            self.active.pop()

    def wrap(self, learner, name):
        stage = getattr(learner, name)

        def run(*args):
            with self.stage(name, args):
                after = stage(*args)
            if isinstance(after, BaseStep):
                self.write(name, next(a for a in args if isinstance(a, BaseStep)), after)
            return after

        def generate(*args):
            with self.stage(name, args):
                yield from stage(*args)

        setattr(learner, name, generate if inspect.isgeneratorfunction(stage) else run)

    def write(self, name, before, after):
        before, after = vars(before), vars(after)
        changed = {f for f in after if after[f] is not before.get(f)}
        if after.get("batch") is not None and "batch" in changed:
            old = {} if before.get("batch") is None else columns_of(before["batch"])
            columns = columns_of(after["batch"])
            new = {c for c in columns if columns[c] is not old.get(c)}
            changed |= {f"batch.{c}" for c in new - ALWAYS}
            if old and not new & ALWAYS:
                changed.discard("batch")
        self.writes.setdefault(name, set()).update(changed)


def columns_of(batch):
    return {**batch.token_columns, **batch.sequence_columns}


def documented(function):
    """{"Reads": names, "Writes": names} of the docstring of a stage."""
    text = " ".join(inspect.getdoc(function).split())
    lines = re.search(r"Reads: ([^:]*?)\. Writes: ([^:]*?)\.(?: |$)", text)
    assert lines, f"{function.__qualname__} has no line 'Reads: ... Writes: ...'"
    parts = [set() if part == "nothing" else set(part.split(", ")) for part in lines.groups()]
    return dict(zip(("Reads", "Writes"), parts, strict=True))


def compare(cases, stages, train, monkeypatch):
    """Checks each stage against its list and those of the stages it overrides; some learner must use each name."""
    seen = {}
    for case, make in cases.items():
        learner, data = make()
        with monkeypatch.context() as patch:
            recorder = Recorder(patch)
            for name in stages:
                recorder.wrap(learner, name)
            train(learner, data)
        for name in stages:
            found = {"Reads": recorder.reads.get(name, set()), "Writes": recorder.writes.get(name, set())}
            overridden = [vars(c)[name] for c in type(learner).__mro__ if name in vars(c)]
            for kind, names in found.items():
                listed = set().union(*(documented(stage)[kind] for stage in overridden))
                extra = {n for n in names - listed if not (n.startswith("batch.") and "batch.*" in listed)}
                assert not extra, f"{case}: {overridden[0].__qualname__} {kind} {sorted(extra)} and does not list them"
                for stage in overridden:
                    seen.setdefault(stage, {"Reads": set(), "Writes": set()})[kind] |= names
    for stage, found in seen.items():
        for kind, names in documented(stage).items():
            missing = {n for n in names - found[kind] if n != "batch.*"}
            assert not missing, f"{stage.__qualname__} lists {kind}: {sorted(missing)}, and no learner does so"


def rl(cls, config, made):
    data = DataConfig(batch_size=2, shuffle=False)
    return cls(made, config, length_reward, data=data, data_shuffle_seed=0), rows(4)


def grpo(made=None, **algo):
    fields = {"beta": 0.0, "num_generations": 4, **algo}
    return rl(GRPOLearner, GRPOConfig(**fields), made or cluster(max_steps=2))


def ppo(critic, **algo):
    options = {"critic_optimizer": OptimConfig(lr=1e-3)} if critic != "actor" else {}
    made = cluster(critic=critic, reference=tiny_model(1), max_steps=2, **options)
    return rl(PPOLearner, PPOConfig(beta=0.1, **algo), made)


POLICIES = {
    "GRPO": grpo,
    "GRPO with everything": lambda: grpo(
        cluster(reference=tiny_model(1), max_steps=2),
        beta=0.1,
        kl_type="reward",
        target_kl=0.1,
        sampler_is="token",
        sampler_is_normalize=True,
        loss_masks=("top-entropy",),
        top_entropy_quantile=0.5,
        dynamic_sampling=True,
        group_reward_bounds=(-2.0, -1.0),  # no group is between them
        max_num_gen_batches=2,
    ),
    "GRPO without truncated completions": lambda: grpo(mask_truncated_completions=True),
    "GRPO with the KL in the advantage": lambda: grpo(
        cluster(reference=tiny_model(1), max_steps=2), beta=0.1, kl_type="advantage", use_rollout_logps=False
    ),
    "distillation": lambda: grpo(cluster(teacher=tiny_model(1), max_steps=2), policy_loss_fn="distillation"),
    "PPO": lambda: ppo(tiny_model(2), advantage_estimator="gae"),
    "PPO on a shared backbone": lambda: ppo("actor", num_generations=2, advantage_estimator="rloo"),
}


def supervised(cls, config, **models):
    trainer = SupervisedTrainingConfig(pbar_description=None, max_steps=2)
    roles = SupervisedModels(tokenizer=byte_tokenizer(), config=trainer, **models)
    return cls(roles, config, data=SupervisedDataConfig(batch_size=3))


PAIRS = [{"prompt": f"{i}=", "chosen": f"{i + 1}" * 2, "rejected": f"{i * 7}!"} for i in range(6)]
LABELLED = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 > 0} for i, r in enumerate(PAIRS)]
RESPONSES = [{"prompt": r["prompt"], "response": r["chosen"]} for r in PAIRS]
SUPERVISED = {
    "SFT": lambda: (supervised(SFTLearner, SFTConfig(), actor=tiny_model()), RESPONSES),
    "DPO": lambda: (preference("sigmoid"), PAIRS),
    "BCO": lambda: (preference("bco"), PAIRS),
    "KTO": lambda: (preference("kto"), LABELLED),
    "reward model": lambda: (
        supervised(RewardModelLearner, RewardModelConfig(), reward_model=tiny_model()),
        PAIRS,
    ),
}


def preference(name):
    return supervised(PreferenceLearner, PreferenceConfig(loss_type=name), actor=tiny_model(), reference=tiny_model(1))


def test_the_stages_of_reinforcement_learning(monkeypatch):
    compare(POLICIES, RL_STAGES, lambda learner, data: learner.train(data, data[:2]), monkeypatch)


def test_the_stages_of_supervised_training(monkeypatch):
    compare(SUPERVISED, SUPERVISED_STAGES, lambda learner, data: learner.train(data, data), monkeypatch)
