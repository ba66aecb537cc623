"""whet.trl against the installed TRL: the same arguments give the same loss and gradient, and the same first step."""

import collections
import functools
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from chat_templates import TOOLS
from helpers import END, PAD, Events, length_reward, random_batch, rows, tiny_model

import whet.trl
from whet.data.tokenizer import byte_tokenizer
from whet.envs.tool_calls import ToolTemplate
from whet.learners.from_config import make_objective
from whet.learners.kl_controller import KLController
from whet.trl import GRPOConfig, GRPOTrainer
from whet.trl.config.translate import grpo_algorithm as algorithm
from whet.trl.rl.learner import TRLLearner
from whet.types import LossInputs

trl = pytest.importorskip("trl")
SHAPES = ((3, (4, 2, 6)), (2, (5, 3, 1)))
LENGTHS, WIDTH = (4, 2, 6, 5, 3, 1), 6
BOTH = {"num_generations": 3, "per_device_train_batch_size": 6, "max_completion_length": WIDTH, "bf16": False}
COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")


@functools.cache
def front():
    """A front on a tiny model: one for all cases, each with its own algorithm."""
    return GRPOTrainer(tiny_model(), length_reward, GRPOConfig(**BOTH, save_strategy="no", disable_tqdm=True),
                       train_dataset=rows(2), processing_class=byte_tokenizer())  # fmt: skip


def learner_of(args):
    """A learner of these arguments, on the one cluster."""
    made, algo = front(), algorithm(args)
    plain = algorithm(GRPOConfig(**BOTH))  # for whose engine all is there; the objective is that of the arguments
    learner = TRLLearner(made.cluster, plain, [length_reward], data=made.learner.data)
    learner.algo_config, learner.objective, learner.kl_controller = algo, make_objective(algo), KLController(algo)
    learner.kl_controller.entropy = 0.0  # of the update before
    learner.agents, learner.trainer = made.learner.agents, made
    made.cluster.actor_trainer.set_loss(
        learner.loss,
        loss_agg_mode=algo.loss_agg_mode,
        loss_agg_norm=float(WIDTH) if algo.loss_agg_mode == "sequence-mean-token-scale" else None,
        loss_agg_units=algo.loss_agg_units,
    )
    return learner


def inputs(seed, masked=()):
    """A batch with all columns in float64, and logprobs and entropies to differentiate. Args: masked: whole rows."""
    batch = random_batch(*SHAPES, seed=seed)
    g = torch.Generator().manual_seed(seed)
    draw = lambda: -torch.rand(batch.num_tokens, generator=g, dtype=torch.float64) * 2 - 0.05
    columns = {name: draw() for name in COLUMNS}
    columns["old_logprobs"] = columns["logprobs"] + 0.4 * (columns["old_logprobs"] + 1)
    columns["entropy"] = -columns["entropy"]
    keep = ~torch.isin(batch.sequence, torch.tensor(masked, dtype=torch.long))
    given = {n: columns.pop(n).requires_grad_() for n in ("logprobs", "entropy")}
    return batch.replace(mask=batch.mask & keep, **columns), given


def padded(batch, column):
    """[rows, WIDTH] of a column of the token axis."""
    out = torch.zeros(batch.num_sequences, WIDTH, dtype=column.dtype)
    for i in range(batch.num_sequences):
        own = column[batch.sequence == i]
        out[i, : len(own)] = own
    return out


def ours(args, batch, given, monkeypatch):
    """Loss and gradients of the front."""
    learner = learner_of(args)
    found = SimpleNamespace(entropy=given["entropy"].detach())
    monkeypatch.setattr(learner.cluster.actor, "logprobs", lambda *_, **__: found)
    mini = learner.cluster.actor_trainer.add_loss_weights(learner.with_update_columns(batch))
    own = {n: c for n, c in mini.token_columns.items() if n not in ("tokens", "mask")}
    x = LossInputs(
        sequence=mini.sequence, mask=mini.mask, token_columns=own,
        **{n: torch.where(mini.mask, c, 0.0) for n, c in given.items()},
    )  # fmt: skip
    loss = (learner.loss(x)[0] * mini.weights).sum()
    return loss, torch.autograd.grad(loss, list(given.values()), allow_unused=True)


def theirs(kwargs, batch, given):
    """Loss and gradients of TRL's _compute_loss."""
    args = trl.GRPOConfig("out", use_cpu=True, **{**BOTH, **kwargs})
    mask = padded(batch, batch.mask).long()
    whole = lambda x, **_: x
    own = SimpleNamespace(
        args=args, accelerator=SimpleNamespace(num_processes=1, gather=whole, reduce=whole, sync_gradients=True,
                                               pad_across_processes=whole),
        model=SimpleNamespace(training=True), epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        _entropy_bonus_enabled=args.entropy_coef != 0 or args.use_adaptive_entropy,
        _last_world_entropy=0.0, _entropy_window_stats=None, _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            padded(batch, given["logprobs"]), padded(batch, given["entropy"]), None),
        **{n: getattr(args, n) for n in (
            "beta", "entropy_coef", "importance_sampling_level", "loss_type", "max_completion_length",
            "off_policy_mask_threshold", "top_entropy_quantile", "use_adaptive_entropy", "use_vllm",
            "vllm_importance_sampling_correction")},
    )  # fmt: skip
    cls = trl.GRPOTrainer
    own.get_high_entropy_mask = functools.partial(cls.get_high_entropy_mask, own)
    own.get_off_policy_mask, own.get_gamma_weights = cls.get_off_policy_mask, cls.get_gamma_weights
    blank = torch.zeros(batch.num_sequences, 1, dtype=torch.long)
    columns = {n: padded(batch, batch.column(n)) for n in ("old_logprobs", "ref_logprobs", "sampler_logprobs")}
    advantages = torch.stack([batch.advantages[batch.sequence == i][0] for i in range(batch.num_sequences)])
    made = {
        "prompt_ids": blank, "prompt_mask": blank, "completion_ids": torch.zeros_like(mask), "completion_mask": mask,
        "advantages": advantages, "num_items_in_batch": mask.sum(), "old_per_token_logps": columns["old_logprobs"],
        "ref_per_token_logps": columns["ref_logprobs"], "sampling_per_token_logps": columns["sampler_logprobs"],
    }  # fmt: skip
    if args.use_vllm:
        made["importance_sampling_ratio"] = is_ratio(args, columns, mask)
    loss = cls._compute_loss(own, None, made)
    return loss, torch.autograd.grad(loss, list(given.values()), allow_unused=True)


def is_ratio(args, columns, mask):
    """The ratio by the formula of TRL's page on vLLM; its own statement is checked in test_control_trl."""
    level, how = args.vllm_importance_sampling_mode.split("_")
    log_ratio = (columns["old_logprobs"] - columns["sampler_logprobs"]) * mask
    ratio = (log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True)).exp()
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max or math.inf
    return ratio.clamp(low, high) if how == "truncate" else ratio * ((ratio >= low) & (ratio <= high))


def same(found, expected):
    """Loss and gradients are equal to 1e-6 relative; no gradient is one of 0."""
    torch.testing.assert_close(found[0], expected[0].double(), rtol=1e-6, atol=1e-12)
    for a, b in zip(found[1], expected[1], strict=True):
        if a is None or b is None:
            assert all(x is None or not x.any() for x in (a, b))
        else:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo")
CASES = [
    *({"loss_type": name} for name in LOSS_TYPES),
    *({"loss_type": name, "importance_sampling_level": "sequence"} for name in LOSS_TYPES if name != "vespo"),
    *({"loss_type": name, "entropy_coef": 0.3} for name in LOSS_TYPES),
    *({"loss_type": name, "top_entropy_quantile": 0.5, "entropy_coef": 0.3} for name in ("grpo", "dapo", "luspo")),
    *({"loss_type": name, "beta": 0.2} for name in ("dapo", "grpo", "sapo", "cispo")),
    {"beta": 0.2, "use_bias_correction_kl": False},
    {"beta": 0.2, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.2},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 3.0},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    {"off_policy_mask_threshold": 0.05},
    {"off_policy_mask_threshold": 0.05, "loss_type": "grpo", "beta": 0.1},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 0.2, "loss_type": "grpo"},
]


@pytest.mark.parametrize("masked", [(), (1, 5)], ids=["all", "two rows masked out"])
@pytest.mark.parametrize("kwargs", CASES, ids=lambda c: "-".join(f"{n}={v}" for n, v in c.items()))
def test_the_loss_and_the_gradient_of_each_option(kwargs, masked, monkeypatch):
    batch, given = inputs(1, masked)
    same(ours(GRPOConfig(**{**BOTH, **kwargs}), batch, given, monkeypatch), theirs(kwargs, batch, given))


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
def test_the_importance_sampling_for_vllm(mode, monkeypatch):
    batch, given = inputs(2)
    kwargs = {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.3}
    same(ours(GRPOConfig(**{**BOTH, **kwargs}), batch, given, monkeypatch), theirs(kwargs, batch, given))


def test_the_default_of_the_importance_sampling_for_vllm_is_trl_s_and_the_geometric_mean_is_another(monkeypatch):
    batch, given = inputs(2)
    kwargs = {"use_vllm": True, "vllm_importance_sampling_clip_max": 1.3}
    mine = lambda **own: ours(GRPOConfig(**{**BOTH, **kwargs, **own}), batch, given, monkeypatch)
    want = theirs(kwargs, batch, given)
    same(mine(), want)
    geometric = mine(vllm_importance_sampling_mode="geometric_mask")
    assert geometric[0].item() != pytest.approx(want[0].item(), rel=1e-3)


NOT_OVERRIDDEN = set(
    "autocast_smart_context_manager call_model_init compute_loss_context_manager create_accelerator_and_postprocess "
    "floating_point_ops get_cp_size get_gamma_weights get_high_entropy_mask get_learning_rates get_off_policy_mask "
    "get_optimizer_group get_sp_size get_total_train_batch_size get_tp_size init_hf_repo metrics_format num_examples "
    "set_initial_training_values store_flos".split()
)
"""Helpers of the loop of transformers that recipes neither override nor call."""


@pytest.mark.parametrize("name", ["DPOTrainer", "GRPOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"])
def test_every_public_method_of_trl_s_is_there_or_refused_where_a_subclass_overrides_it(name):
    theirs, ours = getattr(trl, name), getattr(whet.trl, name)
    methods = {n for n in dir(theirs) if not n.startswith("_") and callable(getattr(theirs, n))}
    assert methods - {*dir(ours)} - ours.NOT_CALLED.keys() == NOT_OVERRIDDEN & methods
    assert not ours.NOT_CALLED.keys() & {*dir(ours)}


# ---- a training in both --------------------------------------------------------------------------------------------


def stub(calls):
    """A `generate` whose completions depend on the call and the row alone; most end, one is cut."""

    def generate(input_ids, **_):
        rng = np.random.default_rng(len(calls))
        calls.append(input_ids.clone())
        made = torch.from_numpy(rng.integers(40, 120, (len(input_ids), WIDTH)))
        for row, length in enumerate(rng.integers(1, WIDTH + 1, len(input_ids))):
            made[row, length - 1 :] = PAD
            made[row, length - 1] = END if row else 65
        made[0] = torch.arange(65, 65 + WIDTH)  # no end
        return torch.cat([input_ids, made], 1)

    return generate


def trained(module, method, folder, seen, **kwargs):
    """A run of a few steps; its trainer, its events and the prompts of its calls."""
    data = datasets.Dataset.from_list([{"prompt": f"{i}+{i}=", "answer": i} for i in range(4)])
    fields = {
        **BOTH,
        "disable_tqdm": True,
        "eval_steps": 2,
        "eval_strategy": "steps",
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "max_steps": 2,
        "per_device_eval_batch_size": 6,
        "report_to": "none",
        "save_steps": 1,
        "shuffle_dataset": False,
        "use_cpu": True,
    }
    args = getattr(module, f"{method}Config")(str(folder), **{**fields, **kwargs})

    def letters(completions, answer, trainer_state, **_):
        seen.append((completions, answer, trainer_state.global_step))
        unscored = {3: math.nan, 4: None}
        return [unscored.get(i, float(sum(map(ord, c)) % 7)) for i, c in enumerate(completions)]

    def length(completion_ids, log_metric, **_):
        log_metric("ids", float(sum(map(len, completion_ids))))
        return [len(ids) / 10 for ids in completion_ids]

    events, calls = Events(), []
    path = folder.parent / "model"
    tiny_model().save_pretrained(path)  # of which TRL reads its reference
    trainer = getattr(module, f"{method}Trainer")(str(path), [letters, length], args, data, data.select(range(2)),
                                                  byte_tokenizer(), callbacks=[events])  # fmt: skip
    trainer.model.generate = stub(calls)
    trainer.train()
    return trainer, events.seen, calls


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("GRPO", {"loss_type": "dapo"}),
        (
            "GRPO",
            {
                "loss_type": "grpo",
                "beta": 0.1,
                "reward_weights": [1.0, 0.5],
                "scale_rewards": "batch",
                "max_steps": 3,
                "logging_steps": 2,
            },
        ),
        ("GRPO", {"loss_type": "sapo", "multi_objective_aggregation": "normalize_then_sum", "save_strategy": "epoch"}),
        ("RLOO", {"beta": 0.3, "num_iterations": 2, "max_steps": 4, "logging_steps": 2, "save_steps": 2}),
        ("RLOO", {"beta": 0.0, "normalize_advantages": True, "reward_clip_range": (1.0, 4.0)}),
    ],
    ids=["dapo", "grpo", "sapo", "rloo", "rloo-normalized"],
)
def test_a_training_is_told_logged_and_stepped_as_in_trl(method, kwargs, tmp_path):
    seen, expected = [], []
    trainer, events, calls = trained(whet.trl, method, tmp_path / "whet", seen, **kwargs)
    theirs, told, theirs_calls = trained(trl, method, tmp_path / "trl", expected, **kwargs)
    assert [c.tolist() for c in calls] == [c.tolist() for c in theirs_calls]
    assert seen == expected
    known = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_prediction_step")
    assert [e for e in events if e[0] not in known] == [e for e in told if e[0] not in known]
    ours, trls = trainer.state.log_history, theirs.state.log_history
    assert [row["step"] for row in ours] == [row["step"] for row in trls]
    for mine, row in zip(ours, trls, strict=True):
        assert row.keys() - mine.keys() <= {"eval_steps_per_second"}, "a metric of TRL's is not logged"
        timed = ("runtime", "second", "step_time", "flos", "policy_loss")
        timed += ("_max", "_min") if "num_iterations" in kwargs else ()  # here of all updates, there a mean of each's
        timed += ("zero_std",) if method == "RLOO" else ()  # there of rewards as clipped, less the KL
        for name, value in row.items():
            if not any(word in name for word in timed):
                rel = 1e-2 if name == "entropy" else 2e-4  # of the tokens that were run: one completion has no reward
                assert mine[name] == pytest.approx(value, rel=rel, abs=2e-6), (row["step"], name)
    made = [sorted(p.name for p in (tmp_path / side).glob("check*")) for side in ("whet", "trl")]
    assert made[0] == made[1] != []


# ---- tools ---------------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def shout(text: str) -> str:
    """Says it loudly.

    Args:
        text: what to say.
    """
    if not text:
        raise ValueError("nothing to say")
    return text.upper()


class Box:
    """An environment."""

    def reset(self, prompt, **_):
        self.held = 1
        return " A box is here."

    def put(self, count: int) -> int:
        """Puts something in.

        Args:
            count: how many.
        """
        self.held += count
        return self.held

    def get_reward(self):
        return float(self.held)


CALL = '<tool_call>\n{{"name": "{}", "arguments": {{{}}}}}\n</tool_call>'
TURNS = [
    ["so " + CALL.format("add", '"a": 1, "b": 2') + CALL.format("shout", '"text": "hi"'), "plain",
     CALL.format("shout", '"text": ""'), CALL.format("put", '"count": 4'), "<tool_call>\n{broken}\n</tool_call>",
     CALL.format("add", '"a": 1')],
    ["3", CALL.format("add", '"a": 5, "b": 5'), "x" * 200, ""],
    ["10"],
]  # fmt: skip


def with_tools(module, config, folder, seen, **given):
    """A step with tools; its trainer."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS
    tokenizer.response_template = ToolTemplate(tokenizer, {}, [END]).response_template
    left = [list(texts) for texts in TURNS]

    def generate(input_ids, **_):
        made = [[*text.encode(), END] for text in left.pop(0)]
        assert len(made) == len(input_ids)
        width = max(map(len, made))
        return torch.cat([input_ids, torch.tensor([m + [PAD] * (width - len(m)) for m in made])], 1)

    def judge(prompts, completions, completion_ids, **_):
        seen.append((prompts, completions, completion_ids))
        return [float(len(ids) % 5) for ids in completion_ids]

    args = config(str(folder), **{**BOTH, "max_completion_length": 400, "disable_tqdm": True, "logging_steps": 1,
                  "max_steps": 1, "report_to": "none", "save_strategy": "no", "shuffle_dataset": False,
                  "use_cpu": True, "learning_rate": 1e-2, "beta": 0.0})  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(2)])
    trainer = module.GRPOTrainer(tiny_model(max_position_embeddings=2048), judge, args, data,
                                 processing_class=tokenizer, **given)  # fmt: skip
    trainer.model.generate = generate
    trainer.train()
    return trainer


@pytest.mark.parametrize("given", [{"tools": [add, shout]}, {"tools": [add, shout], "environment_factory": Box}],
                         ids=["tools", "environment"])  # fmt: skip
def test_episodes_with_tools_are_those_of_trl(given, tmp_path):
    seen, expected = [], []
    ours = with_tools(whet.trl, GRPOConfig, tmp_path / "whet", seen, **given)
    theirs = with_tools(trl, trl.GRPOConfig, tmp_path / "trl", expected, **given)
    assert seen == expected
    mine, row = ours.state.log_history[0], theirs.state.log_history[0]
    assert row.keys() <= mine.keys()
    for name in ("tools/call_frequency", "tools/failure_frequency", "loss", "grad_norm", "reward", "reward_std",
                 "completions/mean_length", "completions/max_length", "completions/clipped_ratio"):  # fmt: skip
        assert mine[name] == pytest.approx(row[name], rel=2e-4, abs=2e-6), name
