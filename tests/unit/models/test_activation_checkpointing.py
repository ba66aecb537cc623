import logging
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from helpers import cluster, length_reward, random_batch, rows, same, tiny_model, weights_of
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from whet.config import CheckpointingOptions, DataConfig, GRPOConfig, OptimConfig, RoleConfig
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.models import matmul
from whet.models.activation_checkpointing import MODES, checkpoint_activations
from whet.models.fast_layers import FastLayers
from whet.models.forward import token_stats
from whet.models.load import load_model
from whet.native import segments
from whet.native.build import Unavailable
from whet.native.segments import segment_kernels
from whet.packing.micro_batch_planner import plan_micro_batches

BATCH = random_batch((9, [7, 3, 5]), (4, [6, 6]), seed=3)  # prompts shared by three and by two completions


def loaded_with(mode, **fields):
    loaded = load_model(tiny_model(**fields))
    checkpoint_activations(loaded.module, mode)
    return loaded


def run(loaded, batch=BATCH, attention="auto"):
    """One forward pass over a packed batch, as one number."""
    (micro,) = plan_micro_batches(batch, max_tokens=4096, packable=loaded.packable, attention=attention)
    assert micro.layout is not None
    weights = torch.linspace(-1, 1, len(micro.targets))
    return (weights * token_stats(loaded, micro).logprobs).sum()


def gradients(mode, **fields):
    loaded = loaded_with(mode, **fields)
    total = run(loaded)
    total.backward()
    return total.detach(), {n: p.grad for n, p in loaded.module.named_parameters()}


DEAR = (
    "aten.mm.default",
    "aten.addmm.default",
    "mkldnn._linear_pointwise.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "whet.attend_segments.default",
)


class Products(TorchDispatchMode):
    """Counts the matrix products that are run, and all operators by name."""

    def __init__(self):
        super().__init__()
        self.runs = Counter()

    @property
    def count(self):
        return self.runs["aten.mm.default"] + self.runs["aten.addmm.default"]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


def held_bytes(mode):
    """What a forward pass leaves allocated for the backward pass: all that was taken less all that was given back."""
    loaded = loaded_with(mode, hidden_size=64, intermediate_size=192, head_dim=16)
    run(loaded)  # layouts and tables that are made once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        total = run(loaded, random_batch((30, [40, 40, 40, 40])))
    assert total.requires_grad
    return sum(e.self_cpu_memory_usage for e in seen.key_averages())  # pyright: ignore[reportAttributeAccessIssue]


# ---- the same gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_packed_rows_with_shared_prefixes_are_those_without_to_the_bit(mode, dtype):
    (plain, expected), (again, found) = gradients("none", dtype=dtype), gradients(mode, dtype=dtype)
    assert torch.equal(plain, again) and same(found, expected)
    assert all(g.abs().max() > 0 for g in expected.values())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_attention_that_is_written_out_and_padded_rows_give_the_same_gradients(mode):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 8}
    found = {}
    for name in ("none", mode):
        torch.manual_seed(0)
        loaded = load_model(Gemma2ForCausalLM(Gemma2Config(**sizes, **heads)))  # softcap: attention written out
        checkpoint_activations(loaded.module, name)
        run(loaded).backward()
        loaded.module.set_attn_implementation("eager")
        for micro in plan_micro_batches(BATCH, max_tokens=4096, packable=False):
            out = loaded.module(input_ids=micro.input_ids, attention_mask=micro.attention_mask, use_cache=False)
            out.logits.square().mean().backward()
        found[name] = {n: p.grad for n, p in loaded.module.named_parameters()}
    assert same(found["none"], found[mode])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_micro_batch_can_follow_another_before_the_step(mode):
    one, two = loaded_with("none"), loaded_with(mode)
    other = random_batch((3, [4, 8]), seed=4)
    for loaded in (one, two):
        for batch in (BATCH, other, BATCH):
            run(loaded, batch).backward()
    grads = [{n: p.grad for n, p in x.module.named_parameters()} for x in (one, two)]
    assert same(*grads)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_trial_of_the_native_kernels_leaves_the_layer_that_asks_first_alone(mode):
    _, expected = gradients("none")
    segments.segment_kernels.cache_clear()
    assert same(gradients(mode)[1], expected)


# ---- less memory ---------------------------------------------------------------------------------------------------


def test_each_mode_holds_much_less_than_the_one_before():
    none, selective, full = (held_bytes(m) for m in MODES)
    assert full < 0.7 * selective and selective < 0.7 * none, (none, selective, full)


def test_selective_runs_no_product_of_a_layer_twice_and_full_runs_all_of_them_twice():
    counts = {}
    for mode in MODES:
        loaded = loaded_with(mode)
        with Products() as seen:
            run(loaded).backward()
        counts[mode] = seen.count
    assert counts["selective"] == counts["none"]
    # 7 products a layer; the last of the second run gives nothing that the backward pass reads, and is stopped before
    assert counts["full"] - counts["none"] in (2 * 6, 2 * 7)


@pytest.mark.parametrize("layers", ["own", "fast"])
@pytest.mark.parametrize("attention", ["auto", "plain"])
def test_selective_runs_no_product_with_a_bias_nor_by_onednn_nor_attention_twice(layers, attention, monkeypatch):
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    runs = {}
    for mode in ("none", "selective"):
        loaded = loaded_with(mode, attention_bias=True)
        with Products() as seen, FastLayers(loaded.module).enabled() if layers == "fast" else nullcontext():
            run(loaded, attention=attention).backward()
        runs[mode] = {name: seen.runs[name] for name in DEAR}
    assert runs["selective"] == runs["none"]
    onednn = layers == "fast" and matmul.onednn_unsupported_reason() is None
    native = attention == "auto" and not isinstance(segment_kernels(), Unavailable)
    dear = {DEAR[4 if native else 3], DEAR[2 if onednn else 1]}
    assert dear <= {name for name, n in runs["none"].items() if n}  # else nothing has been shown
    assert not runs["none"][DEAR[3 if native else 4]]


# ---- what stays as it is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_reported_and_off_and_no_generator_is_touched(mode, caplog):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=264, n_embd=32, n_head=4, n_layer=2, n_positions=64)  # dropouts of 0.1
    with caplog.at_level(logging.WARNING, "whet"):
        loaded = load_model(GPT2LMHeadModel(config))
    assert "dropouts set to 0" in caplog.text
    checkpoint_activations(loaded.module, mode)
    before = torch.get_rng_state()
    first = run(loaded)
    first.backward()
    assert torch.equal(run(loaded), first) and torch.equal(torch.get_rng_state(), before)


def test_a_model_that_cannot_is_refused_by_name():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)
    )
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*Set gradient_checkpointing=none"):
        checkpoint_activations(model, "full")


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError, match=r"gradient_checkpointing 'selectiv'.*selective"):
        checkpoint_activations(tiny_model(), "selectiv")
    message = r"gradient_checkpointing: input should be 'auto', 'none', 'selective' or 'full'"
    with pytest.raises(ConfigError, match=message):
        RoleConfig(gradient_checkpointing="half")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("given, mode", [(True, "full"), (False, "none"), ("selective", "selective")])
def test_the_configuration_takes_a_bool_or_a_mode(given, mode):
    assert RoleConfig(gradient_checkpointing=given).gradient_checkpointing == mode


# ---- a run ---------------------------------------------------------------------------------------------------------


def trained(model_folder, run_dir, steps, mode, resume=None):
    c = cluster(
        RoleConfig(model=model_folder, gradient_checkpointing=mode, dtype="float32", optim=OptimConfig(lr=1e-2)),
        actor_optimizer=None,
        run_dir=str(run_dir),
        max_steps=steps,
        resume=resume,
        allow_config_change=True,
        checkpointing_options=CheckpointingOptions(save_interval_steps=1),
    )
    algo = GRPOConfig(num_generations=4, beta=0.0)
    GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(8))
    return weights_of(c.actor.module)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_run_learns_what_it_learns_without_also_when_resumed_half_way(mode, model_folder, tmp_path):
    whole = trained(model_folder, tmp_path / "whole", 3, "none")
    trained(model_folder, tmp_path / "parts", 2, mode)
    assert same(trained(model_folder, tmp_path / "parts", 3, mode, resume="latest"), whole)
