"""The plan of memory against what small models really hold, and against numbers counted on a fake CUDA device."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3Config

from whet.cli import commands, main, supervised
from whet.cli.plan import _at_once, plan_text
from whet.cli.supervised import separate_reference
from whet.config import DPORunConfig, PPORunConfig, RMRunConfig, RoleConfig, SFTRunConfig, load_run, load_supervised
from whet.config.lora import LoraConfig
from whet.errors import ConfigError
from whet.models import varlen
from whet.models.attention import Layout, SegmentLayout
from whet.models.fast_layers import FastLayers
from whet.models.lora import add_adapter
from whet.models.varlen import VarlenRow
from whet.parallel.ranks import Ranks
from whet.rollout.base import Request, Sampling
from whet.rollout.engine import scheduler
from whet.rollout.engine.places import Places
from whet.rollout.engine.prefix_cache import MAX_BYTES, PrefixCache
from whet.rollout.in_flight import InFlightRequest
from whet.train.memory_plan import (
    CONVERSATION_BYTES,
    GB,
    MAX_TOKENS,
    RESERVE,
    VLLM_BYTES,
    choose_settings,
    choose_tokens,
    longest_row,
    measure_model,
    plan_memory,
    ways_to_fit,
    with_settings,
)
from whet.train.optimizer import Optim
from whet.train.supervised_models import SupervisedModels

RECIPE = Path(__file__).parents[3] / "recipes/gsm8k_qwen3_0.6b.yaml"
QWEN3 = {  # layers, width, width of the gate, heads; and GB that the modules' own forwards hold of 16,363 tokens
    "0.6B": (28, 1024, 3072, 16, 33.1),
    "1.7B": (28, 2048, 6144, 16, 52.0),
    "4B": (36, 2560, 9728, 32, 100.6),
    "8B": (36, 4096, 12288, 32, 127.4),
}
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def save_config(folder, kind=Qwen3Config, **sizes):
    config = kind(**{**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096, **sizes})
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return str(folder)


def qwen3(folder, name):
    layers, width, gate, heads, _ = QWEN3[name]
    return save_config(
        folder,
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=gate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=name != "8B",
    )


@pytest.mark.parametrize("name", ["0.6B", *(pytest.param(n, marks=pytest.mark.full) for n in QWEN3 if n != "0.6B")])
def test_activations_are_what_each_part_of_a_layer_needs(tmp_path, monkeypatch, name):
    role, (layers, d, gate, heads, own) = RoleConfig(model=qwen3(tmp_path, name)), QWEN3[name]
    sizes = measure_model(role, trained=True)
    # both norms' inputs and outputs, queries before and after the rotation and the result, keys and values, the halves
    numbers, fp32 = 4 * d + 3 * heads * 128 + 3 * 8 * 128 + 2 * gate, 2 + 2 * heads + 8  # and r, and log-sum-exps
    outside = 2 * d + 4 + 2 * 2 * 128 + 8  # the last norm, two tables of the rotation, ids
    assert sizes.activation_bytes == layers * (2 * numbers + 4 * fp32) + outside
    assert sizes.kv_bytes == 2 * layers * 8 * 128 * 2
    if name == "0.6B":
        monkeypatch.setattr(FastLayers, "enabled", lambda self: nullcontext())
        assert measure_model(role, trained=True).activations(16_363, "none") / GB == pytest.approx(own, rel=0.005)


def make_module(folder, dtype=torch.bfloat16):
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="whet").train()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_masters_moments_and_gradients_are_what_an_optimizer_holds(tmp_path, name, dtype, tied):
    save_config(tmp_path, tie_word_embeddings=tied)
    config = load_run([f"model={tmp_path}", f"actor.dtype={dtype}", f"actor.optim.name={name}", "algo.beta=0"])
    plan = plan_memory(config, measure_model(config.actor, trained=True))
    module = make_module(tmp_path, getattr(torch, dtype))
    optim = Optim(module, dataclasses.replace(config.actor.optim, lr=0.1), dtype=getattr(torch, dtype))
    loss = module.lm_head(module.model.embed_tokens.weight).float().square().sum()
    (loss + sum(p.float().sum() for p in module.parameters())).backward()  # a gradient for each
    masters = [m for n, m in optim.masters.items() if m is not optim.params[n]]
    held = {"weights": module.parameters(), "fp32 masters": masters}
    held["gradients"] = [m.grad for m in optim.masters.values()]
    optim.step()
    held[f"{name} moments"] = [x for state in optim.optimizer.state.values() for x in state.values() if x.numel() > 1]
    parts = {part.name: part for part in plan.parts}
    for part, tensors in held.items():
        planned = parts[part].update if part in parts else 0.0
        if part == "gradients":
            planned -= max(p.numel() for p in module.parameters()) * getattr(torch, dtype).itemsize
        assert planned == sum(x.nbytes for x in tensors), part


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)])
def test_activations_are_what_a_pass_on_a_processor_saves(tmp_path, monkeypatch, kind, lora):
    monkeypatch.setattr(FastLayers, "enabled", lambda self: nullcontext())
    sizes = measure_model(RoleConfig(model=save_config(tmp_path, kind), lora=lora), trained=True)
    module = make_module(tmp_path)
    if lora is not None:
        add_adapter(module.requires_grad_(False), lora)
    own, saved = {p.data_ptr() for p in module.parameters()}, {}

    def count(tokens):
        saved.clear()
        layout = SegmentLayout((tokens,), (-1,), "cpu", attention="plain")
        keep = lambda x: saved.setdefault(x.untyped_storage().data_ptr(), x)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            ids = torch.zeros(1, tokens, dtype=torch.long)
            module.model(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
        return sum(x.untyped_storage().nbytes() for key, x in saved.items() if key not in own)

    assert (count(512) - count(256)) / 256 == pytest.approx(sizes.activation_bytes, rel=0.05)


class _Kernel(torch.autograd.Function):
    """varlen_attn by what it holds for the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out


class _RowLayout(Layout):
    def __init__(self, lengths, parents):
        self.row, self.position_ids = VarlenRow(lengths, parents), SegmentLayout(lengths, parents).position_ids

    def attend(self, layer, q, k, v, *, scale, window, **options):
        return self.row.attend(q, k, v, scale=scale, window=window)


def test_keys_that_attention_gathers_for_a_shared_prompt_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *tables, **options: _Kernel.apply(q, k, v))
    lengths = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64", "algo.num_generations=4"]
    config = load_run([f"model={save_config(tmp_path)}", "trainer.max_tokens_per_microbatch=640", *lengths])
    monkeypatch.setattr(FastLayers, "enabled", lambda self: nullcontext())
    sizes, module = measure_model(config.actor, trained=True), make_module(tmp_path)

    def saved(tokens):
        layout, held = _RowLayout([tokens] * 5, [-1, 0, 0, 0, 0]), {}
        keep = lambda x: held.setdefault(x.untyped_storage().data_ptr(), x)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            ids = torch.zeros(1, 5 * tokens, dtype=torch.long)
            module.model(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
        own = {p.data_ptr() for p in module.parameters()}
        return sum(x.untyped_storage().nbytes() for key, x in held.items() if key not in own)

    (part,) = [p for p in plan_memory(config, sizes).parts if p.name.startswith("activations")]
    assert saved(128) - saved(64) == pytest.approx(part.update / 2, rel=0.02)
    keys = (64 + 4 * (64 + 64)) / (64 + 4 * 64)  # a token's: a prompt, and four completions that read it too
    assert part.update == pytest.approx(sizes.activations(640, "none") + (keys - 1) * 640 * sizes.kv_bytes)
    fixed = ["trainer.max_tokens_per_microbatch=640", "actor.gradient_checkpointing=none"]
    folder = f"model={tmp_path}"
    short = load_run([folder, *fixed, lengths[0], "rollout.max_tokens_to_generate=4", "algo.num_generations=99"])
    pairs = load_supervised([folder, *fixed, "data=rows.jsonl"], DPORunConfig)
    for other, most in ((short, varlen.MAX_KEYS), (pairs, 5 / 3)):  # an answer of a pair is as long as its prompt
        (part,) = [p for p in plan_memory(other, sizes).parts if p.name.startswith("activations")]
        assert part.update == pytest.approx(sizes.activations(640, "none", most))


def test_a_cache_is_what_the_plan_says(tmp_path):
    config = load_run([f"model={save_config(tmp_path)}", "rollout.kv_cache_tokens=2000"])
    sizes = measure_model(config.actor, trained=True)
    plan = plan_memory(config, sizes)
    (part,) = [p for p in plan.parts if p.name.startswith("KV")]
    assert part.name == "KV cache, 2,000 tokens" and part.rollout == 2000 * 3 * 2 * 2 * 8 * 2 and part.update == 0


@pytest.mark.parametrize("tokens", [2000, 2057, 6000])
def test_so_many_completions_run_at_once_as_the_plan_says(tmp_path, monkeypatch, tokens):
    lengths = ["rollout.max_prompt_length=50", "rollout.max_tokens_to_generate=100", "rollout.max_batch_size=40"]
    config = load_run([f"model={save_config(tmp_path)}", f"rollout.kv_cache_tokens={tokens}", *lengths])
    plan = plan_memory(config, measure_model(config.actor, trained=True))
    sampling, admitted, count = Sampling(max_tokens=100), [], config.algo.num_generations
    for parts in (scheduler.PARTS, 1):
        monkeypatch.setattr(scheduler, "PARTS", parts)
        waiting = scheduler.Scheduler(max_batch=40, kv_cache_tokens=tokens)
        waiting.pool = Places(tokens)
        keys = [{"id": i, "group": i // count, "rng_key": (0, 0, i // count, i)} for i in range(99)]
        work = [Request(tokens=np.full(50, k["group"], np.int32), sampling=sampling, **k) for k in keys]
        waiting.add([InFlightRequest(request=r) for r in work])
        held = {"prefixes": {}, "conversations": PrefixCache(None), "min_free": 1}
        admitted.append(len(waiting.admit(num_live=0, longest=0, **held)))
    monkeypatch.undo()
    assert _at_once(config, plan) == admitted and (admitted[0] > admitted[1] or tokens == 6000)
    text = f"  at most {admitted[0]} completions at once, {admitted[1]} if all have their full length\n"
    assert text in plan_text(config, measure_model(config.actor, trained=True), plan, 24.0)


def test_vllm_has_weights_of_its_own_and_a_cache_in_tokens(tmp_path):
    lengths = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64", "rollout.max_batch_size=4"]
    words = [f"model={save_config(tmp_path)}", "rollout_engine=vllm", *lengths]
    config = load_run(words)
    sizes = measure_model(config.actor, trained=True)
    parts = {part.name: (part.rollout, part.update) for part in plan_memory(config, sizes).parts}
    assert parts["weights of vLLM"] == (2.0 * sizes.parameters, 0.0)
    assert parts["workspace and graphs of vLLM"] == (VLLM_BYTES, VLLM_BYTES / 2)
    assert choose_settings(config, 24 * GB).rollout.kv_cache_tokens == 4 * 128
    adapted = load_run([*words, "actor.lora.r=8"])
    sizes = measure_model(adapted.actor, trained=True)
    own = plan_memory(adapted, sizes)
    assert "rollout.vllm.share_weights=true" in ways_to_fit(adapted, own.parts[0])
    shared = load_run([*words, "actor.lora.r=8", "rollout.vllm.share_weights=true"])
    plan = plan_memory(shared, sizes)
    assert (own.rollout - plan.rollout, own.update - plan.update) == (2.0 * sizes.parameters, 0.0)
    assert plan_memory(shared, sizes, num_processes=2) == plan_memory(adapted, sizes, num_processes=2)
    assert "share_weights" not in ways_to_fit(shared, plan.parts[0])
    share = load_run([*words, "rollout.vllm.hbm_utilization=0.3"])
    assert choose_settings(share, 24 * GB).rollout.kv_cache_tokens is None


def test_the_head_holds_chunks_of_logits(tmp_path):
    sizes = measure_model(RoleConfig(model=qwen3(tmp_path / "m", "0.6B")), trained=True)
    rows = {n: (sizes.logits(n) - 4 * sizes.largest) / (3 * 4 * 151_936) for n in (16_384, 4096, 300)}
    assert rows == {16_384: 2048, 4096: 1024, 300: 164}
    assert measure_model(RoleConfig(model=save_config(tmp_path)), trained=False, scores=True).logits(300) == 0


def test_the_layers_of_a_model_in_4_bits_are_and_its_embedding_and_head_are_not(tmp_path):
    layers = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
    for tied in (True, False):
        folder = save_config(tmp_path / str(tied), tie_word_embeddings=tied)
        sizes = measure_model(RoleConfig(model=folder, lora=LoraConfig(r=4), quantization="nf4"), trained=True)
        assert sizes.weight_bytes == layers * 9 / 16 + 2 * (sizes.parameters - layers)


def test_settings_that_fit_are_found_and_named(tmp_path):
    model = qwen3(tmp_path / "m", "0.6B")
    words = [f"model={model}", "rollout.max_prompt_length=512", "rollout.max_tokens_to_generate=1024", "algo.beta=0"]
    config = load_run(words)
    sizes = measure_model(config.actor, trained=True)
    assert plan_memory(config, sizes).peak > 40 * GB  # whet's defaults, in which nothing is bounded
    for memory in (24, 40, 80):
        plan = plan_memory(config, sizes, memory=memory * GB)
        assert plan.peak <= memory * GB
        chosen = load_run([*words, *with_settings(config, plan)])
        assert plan_memory(chosen, sizes).parts == plan.parts and with_settings(chosen, plan) == []
    assert not any("kv_cache" in word for word in with_settings(config, plan_memory(config, sizes)))
    forced = load_run([*words, "algo.force_compute_kl=true"])
    assert plan_memory(forced, sizes).update == pytest.approx(plan_memory(config, sizes).update + sizes.weight_bytes)
    fixed = load_run([*words, "trainer.max_tokens_per_microbatch=16384", "actor.gradient_checkpointing=full"])
    assert plan_memory(fixed, sizes, memory=1.0).tokens == 16_384  # what was set stays


@pytest.mark.parametrize(
    ("name", "extra", "memory", "fits"),
    [
        ("0.6B", [], 24, True),
        pytest.param("1.7B", [], 24, False, marks=pytest.mark.full),
        pytest.param("1.7B", [], 80, True, marks=pytest.mark.full),
        pytest.param("4B", ["actor.lora.r=16"], 24, True, marks=pytest.mark.full),
        pytest.param("8B", ["actor.lora.r=16"], 80, True, marks=pytest.mark.full),
        pytest.param("8B", [], 80, False, marks=pytest.mark.full),
        pytest.param("8B", ["actor.lora.r=16", "actor.quantization=nf4"], 24, True, marks=pytest.mark.full),
        ("0.6B", ["PPO"], 24, True),
        pytest.param("4B", ["PPO"], 80, False, marks=pytest.mark.full),
    ],
)
def test_what_fits_where(tmp_path, name, extra, memory, fits):
    words = [
        f"model={qwen3(tmp_path / 'm', name)}",
        "rollout.max_tokens_to_generate=1024",
        *(e for e in extra if "=" in e),
    ]
    config = load_run(words, PPORunConfig) if "PPO" in extra else load_run(words)
    plan = plan_memory(config, measure_model(config.actor, trained=True), memory=memory * GB)
    assert (plan.peak <= memory * GB) is fits


@pytest.mark.full
def test_the_recipe_of_gsm8k_fits_24_gb(tmp_path, caplog):
    config = load_run(["--config", str(RECIPE), f"actor.model={qwen3(tmp_path / 'm', '0.6B')}"])
    with caplog.at_level("INFO", "whet"):
        chosen = choose_settings(config, 24 * GB)
    (line,) = caplog.messages
    assert line.startswith("memory: the largest phase needs ") and "24.0 GB are free; chosen to fit: " in line
    assert "trainer.max_tokens_per_microbatch=16384 rollout.kv_cache_tokens=98304" in line
    assert plan_memory(chosen, measure_model(chosen.actor, trained=True)).peak <= 24 * GB
    assert chosen.actor.gradient_checkpointing == "full"  # the recipe's own
    assert choose_settings(chosen, 24 * GB) == chosen
    assert choose_settings(config, 80 * GB).rollout.kv_cache_tokens is None  # nothing is bounded without need


def test_the_cache_of_conversations_has_a_part_where_episodes_have_turns(tmp_path):
    env = tmp_path / "env.py"
    env.write_text("def interact(*args): return None")
    words = [f"model={qwen3(tmp_path / 'm', '0.6B')}", f"rollout.env_path={env}", "rollout.max_turns=4"]
    config = load_run(words)
    sizes = measure_model(config.actor, trained=True)
    parts = {part.name: part.rollout for part in plan_memory(config, sizes).parts}
    assert parts["KV of earlier turns"] == CONVERSATION_BYTES == MAX_BYTES
    bounded = plan_memory(load_run([*words, "rollout.kv_cache_tokens=9000"]), sizes)
    assert "KV of earlier turns" not in {part.name for part in bounded.parts}
    small = load_run([f"model={save_config(tmp_path / 'small')}", *words[1:]])
    plan = plan_memory(small, measure_model(small.actor, trained=True))
    turns, cache = (next(part for part in plan.parts if part.name.startswith(name)) for name in ("KV of", "KV cache"))
    assert turns.rollout == cache.rollout < CONVERSATION_BYTES


@pytest.mark.full
def test_auto_checkpoints_only_where_it_has_to(tmp_path):
    config = load_run([f"model={qwen3(tmp_path / 'm', '4B')}", "actor.lora.r=16", "rollout.max_prompt_length=512",
                       "rollout.max_tokens_to_generate=1024"])  # fmt: skip
    assert config.actor.gradient_checkpointing == "auto"
    assert choose_settings(config, 24 * GB).actor.gradient_checkpointing == "full"
    assert choose_settings(config, 80 * GB).actor.gradient_checkpointing == "none"
    small = dataclasses.replace(config.trainer, max_tokens_per_microbatch=2048)  # the user's own budget is no reason
    config = dataclasses.replace(config, trainer=small)
    assert choose_settings(config, 80 * GB).actor.gradient_checkpointing == "none"


def test_what_fits_nowhere_is_refused_with_the_largest_part(tmp_path, caplog):
    words = [f"model={qwen3(tmp_path / 'm', '1.7B')}", "rollout.max_prompt_length=512",
             "rollout.max_tokens_to_generate=1024"]  # fmt: skip
    message = r"does not fit.*24\.0 GB are free; the largest part is adamw moments: 13\.8 GB. Try actor\.lora\.r=16"
    with pytest.raises(ConfigError, match=message):
        choose_settings(load_run(words), 24 * GB)
    fixed = ["trainer.max_tokens_per_microbatch=2048", "actor.gradient_checkpointing=full",
             "rollout.kv_cache_tokens=2048"]  # fmt: skip
    config = load_run([*words, *fixed])
    assert choose_settings(config, 24 * GB) is config and "the run may not fit: " in caplog.text


def test_models_that_are_only_read_take_room(tmp_path, caplog):
    model = f"={save_config(tmp_path / 'm')}"
    words = [f"model{model}", "rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64", "algo.beta=0"]
    fixed = ["trainer.max_tokens_per_microbatch=512", "actor.gradient_checkpointing=full",
             "rollout.kv_cache_tokens=2048"]  # fmt: skip
    sizes = measure_model(load_run(words).actor, trained=True)
    teacher, reward = f"teacher.model{model}", f"reward_model.model{model}"
    for more, n, shares in (([teacher], 1, 1.0), ([reward], 1, 1.0), ([teacher, reward], 2, 2.0)):  # it scores whole
        config = load_run([*words, *fixed, *more])
        memory = plan_memory(config, sizes, num_processes=n).peak + shares * sizes.weight_bytes
        for less, said in ((0, False), (1, True)):
            caplog.clear()
            choose_settings(config, memory - less, n)
            assert ("the run may not fit" in caplog.text) is said, (more, less)
    fastest = plan_memory(load_run(words), sizes)
    chosen = choose_settings(load_run([*words, teacher]), fastest.peak + sizes.weight_bytes - 1)
    assert chosen.trainer.max_tokens_per_microbatch < fastest.tokens
    critic = load_run([*words, "actor.gradient_checkpointing=full", "critic.gradient_checkpointing=none"], PPORunConfig)
    chosen = choose_settings(critic, 24 * GB)
    assert (chosen.actor.gradient_checkpointing, chosen.critic.gradient_checkpointing) == ("full", "none")


class FourRanks(Ranks):
    """Four processes, of which one has half the memory."""

    size = 4

    def all_gather(self, value):
        return [value, value, value / 2, value]


def test_a_run_on_a_gpu_takes_the_plan(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    folder = save_config(tmp_path / "m", vocab_size=320)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    words = [f"model={folder}", "tokenizer=byte", f"data={rows}", "reward=exact_match",
             "rollout.max_tokens_to_generate=8"]  # fmt: skip
    memory = RESERVE + 0.5 * GB
    monkeypatch.setattr(commands, "free_gpu_memory", lambda: memory)
    learner, *_ = commands.make_rl_learner(load_run(words))
    try:
        assert learner.cluster.training_config.max_tokens_per_microbatch == MAX_TOKENS
        memory = RESERVE
        with pytest.raises(ConfigError, match="the run does not fit"):
            commands.make_rl_learner(load_run(words))
        monkeypatch.setattr(commands, "join_processes", lambda _: FourRanks())
        memory, planned = RESERVE + 0.5 * GB, []
        monkeypatch.setattr(commands, "choose_settings", lambda config, *plan: planned.append(plan) or config)
        commands._with_memory_plan(load_run(words))
        assert planned == [(memory / 2, 4)]  # of the GPU that has the least
    finally:
        learner.close()


def test_auto_goes_back_to_the_own_engine_where_vllm_does_not_fit(tmp_path, monkeypatch, caplog):
    lengths = ["rollout.max_prompt_length=64", "rollout.max_tokens_to_generate=64"]
    config = load_run([f"model={save_config(tmp_path)}", "rollout_engine=auto", *lengths])
    memory = RESERVE + 0.5 * GB
    monkeypatch.setattr(commands, "free_gpu_memory", lambda: memory)
    monkeypatch.setattr(commands, "choose_engine", lambda *a, **k: "vllm")
    with caplog.at_level("INFO", "whet"):
        assert commands._with_engine_that_fits(config).rollout_engine == "embedded"
    assert "auto: embedded, since with vllm the run does not fit" in caplog.text
    memory += VLLM_BYTES
    assert commands._with_engine_that_fits(config).rollout_engine == "vllm"


PAGE = Path(__file__).parents[3] / "docs/one-gpu.md"
HOW = {
    "all weights": [],
    "all weights, `adamw8bit`": ["actor.optim.name=adamw8bit"],
    "LoRA": ["actor.lora.r=16"],
    "LoRA on 4 bits": ["actor.lora.r=16", "actor.quantization=nf4"],
}


@pytest.mark.parametrize("name", ["0.6B", *(pytest.param(n, marks=pytest.mark.full) for n in QWEN3 if n != "0.6B")])
def test_the_page_has_the_numbers_of_the_plan(tmp_path, capsys, name):
    page, folder = PAGE.read_text(encoding="utf-8"), qwen3(tmp_path / "m", name)
    lengths = ["rollout.max_prompt_length=512", "rollout.max_tokens_to_generate=1024", "algo.beta=0"]
    for how, words in HOW.items():
        rows = [row for row in page.splitlines() if f"| Qwen3-{name} | {how} |" in row]
        if rows:
            config = load_run([f"model={folder}", *lengths, *words])
            sizes = measure_model(config.actor, trained=True)
        for row in rows:
            memory = int(row.split("|")[1])
            plan = plan_memory(config, sizes, memory=memory * GB)
            assert plan.peak <= memory * GB
            cells = (memory, f"Qwen3-{name}", how, f"{plan.tokens:,}", plan.checkpointing, f"{plan.kv_tokens:,}")
            assert row == "| " + " | ".join(map(str, cells)) + f" | {plan.rollout / GB:.1f} | {plan.update / GB:.1f} |"
    if name == "0.6B":
        main(["plan", f"model={folder}", *lengths[:2], "memory_gb=24"])
        assert capsys.readouterr().out.strip() in page


def test_other_architectures_are_counted(tmp_path):
    folder = save_config(tmp_path, GptOssConfig, num_local_experts=4, num_experts_per_tok=2)
    assert measure_model(RoleConfig(model=folder), trained=True).kv_bytes == 3 * 2 * 2 * 8 * 2


def test_the_command(tmp_path, capsys):
    model = qwen3(tmp_path / "m", "4B")
    assert main(["plan", f"model={model}", "actor.lora.r=16", "memory_gb=24"]) == 0
    out = capsys.readouterr().out
    assert "trains 33.0 M of 4,055 M parameters" in out and "\n  fits with " in out and "KV cache" in out
    assert main(["plan", "ppo", f"model={model}"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if " GB: " in line] == [
        f"{size} GB: PPO, bfloat16, trains 4,022.5 M of 4,022 M parameters" for size in (24, 40, 80)
    ]
    assert "does not fit, by" in out and "try actor.lora.r=16" in out
    assert main(["plan", "dpo", f"model={save_config(tmp_path / 'pairs')}", "memory_gb=24"]) == 0
    out = capsys.readouterr().out
    assert "24 GB: DPO" in out and "rows of 2,048 tokens" in out and "rollout" not in out and "reference model" in out
    mesh = ["num_processes=8", "trainer.data_parallel_replicate_size=2", "trainer.context_parallel_size=2"]
    assert main(["plan", f"model={save_config(tmp_path / 'small')}", "memory_gb=80", *mesh]) == 0
    assert "  each of 8 processes: a shard of 4, a pass with 1 other" in capsys.readouterr().out
    assert main(["plan", f"model={model}", "memory_gb=80", "num_processes=8", "offload_to_cpu=true"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "host" in x]
    assert line == ("  8.0 GB of each process in the memory of its host: shards of weights 2.0, adamw moments 4.0, "
                    "gradients 2.0")  # fmt: skip
    nf4 = ["num_processes=2", "actor.lora.r=4", "actor.quantization=nf4"]
    for words, message in (
        ([], "no model; write model="),
        ([f"model={tmp_path}"], "no model, tokenizer or run"),
        ([f"model={model}", "memory_gb=much"], "memory_gb=much: expected the gigabytes of a GPU"),
        ([f"model={model}", "memory=24"], "memory"),
        ([f"model={model}", "num_processes=0"], "num_processes=0: expected a number of processes"),
        ([f"model={model}", "trainer.context_parallel_size=2"], "does not divide the number of processes, 1"),
        ([f"model={model}", *nf4], "does not run on 2 processes"),
    ):
        assert main(["plan", *words]) == 2
        assert message in capsys.readouterr().err


def test_several_processes_share_what_the_mesh_says(tmp_path):
    model, mesh = qwen3(tmp_path / "m", "8B"), "trainer.{}_size={}".format
    words = [f"model={model}", "rollout.max_prompt_length=512", "rollout.max_tokens_to_generate=1024",
             "trainer.max_tokens_per_microbatch=16384", "actor.gradient_checkpointing=none"]  # fmt: skip
    config = load_run(words)
    sizes = measure_model(config.actor, trained=True)
    parts = lambda *more, n=8: {
        p.name.split(",")[0]: p for p in plan_memory(load_run([*words, *more]), sizes, num_processes=n).parts
    }
    one, eight, halves = parts(n=1), parts(), parts(mesh("data_parallel_replicate", 2))
    assert one["weights"].update + one["fp32 masters"].update == 6 * sizes.parameters
    assert eight["shards of weights"].update == halves["shards of weights"].update / 2 == sizes.parameters / 2
    assert eight["adamw moments"].update == one["adamw moments"].update / 8
    assert eight["gathered weights"].rollout == one["weights"].rollout > 8 * eight["gathered weights"].update / 2
    offloaded, all_off = parts("offload_to_cpu=true"), parts("offload_to_cpu=true", "trainer.sync_each_microbatch=true")
    for name in ("shards of weights", "adamw moments"):
        assert (offloaded[name].rollout, offloaded[name].update, offloaded[name].host) == (0, 0, eight[name].update)
    assert offloaded["gradients"].update == eight["gradients"].update
    assert all_off["gradients"].host == offloaded["gradients"].host == 4 * sizes.parameters / 8
    assert all_off["gradients"].update < parts("trainer.sync_each_microbatch=true")["gradients"].update
    assert not any(p.host for p in parts("offload_to_cpu=true", n=1).values())
    tokens = parts(mesh("context_parallel", 4))
    assert tokens["activations"].update == one["activations"].update / 4 and tokens.keys() == eight.keys()
    assert plan_memory(load_run(words[:3]), sizes, num_processes=8, memory=80 * GB).peak <= 80 * GB
    divided, layer = parts(mesh("tensor_parallel", 4)), sizes.layer_parameters
    outside = sizes.parameters - sizes.layers * layer
    assert divided["shards of weights"].update == 4 * sizes.parameters / 8
    assert divided["gathered weights"].update == 2 * (outside + 2 * layer) / 4
    assert divided["gathered weights"].rollout == 2 * (outside + sizes.parameters / 4)
    assert divided["KV cache"].rollout == one["KV cache"].rollout / 4
    assert divided["gradients"].update == pytest.approx((4 * sizes.parameters + 6 * outside) / 4)
    assert divided["logits of the head"].update == one["logits of the head"].update / 4
    assert "captured decode steps" in tokens and "captured decode steps" not in divided
    assert parts(mesh("tensor_parallel", 16), n=16)["KV cache"].rollout == one["KV cache"].rollout / 8  # of 8 heads
    whole = parts(mesh("tensor_parallel", 4), "rollout_engine=hf")  # which runs the whole model
    assert whole["gathered weights"].rollout == 2 * (sizes.parameters + sizes.parameters / 4)
    wide = plan_memory(load_run([*words[:3], mesh("context_parallel", 4)]), sizes, num_processes=8)
    assert wide.tokens == 4 * MAX_TOKENS
    sizes = measure_model(RoleConfig(model=save_config(tmp_path / "s"), lora=LoraConfig(r=4)), trained=True)
    copied = parts("actor.lora.r=4", "offload_to_cpu=true")["gathered weights"].update
    copied -= parts("actor.lora.r=4")["gathered weights"].update  # of a layer's shards; the frozen ones are in bfloat16
    share = sizes.layer_parameters / sizes.parameters / 8
    assert copied == pytest.approx(share * (2 * sizes.parameters + 2 * sizes.trained))


def test_a_missing_config_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no config\.json of a language model"):
        measure_model(RoleConfig(model=str(tmp_path)), trained=True)


@pytest.mark.full
def test_supervised_runs_are_planned_by_their_update(tmp_path, caplog):
    words = [f"model={qwen3(tmp_path / 'm', '0.6B')}", "data=rows.jsonl"]
    sft, dpo, rm = (load_supervised(words, kind) for kind in (SFTRunConfig, DPORunConfig, RMRunConfig))
    with caplog.at_level("INFO", "whet"):
        chosen, tokens = choose_tokens(sft, 24 * GB)
    assert tokens == 4096 and chosen.actor.gradient_checkpointing == "none"  # 1,024 tokens of a row
    assert chosen.trainer.max_tokens_per_microbatch is None  # longer rows raise the budget
    assert "chosen to fit: trainer.max_tokens_per_microbatch=4096 actor.gradient_checkpointing=none" in caplog.text
    assert choose_tokens(sft, 80 * GB)[1] == MAX_TOKENS
    sizes = measure_model(sft.actor, trained=True)
    plan = plan_memory(sft, sizes, memory=24 * GB)
    assert plan.rollout < plan.peak == plan.update <= 24 * GB and plan.kv_tokens == 0
    with_reference = plan_memory(dpo, sizes, reference=float(sizes.weight_bytes))
    assert with_reference.update - plan_memory(dpo, sizes).update == sizes.weight_bytes
    assert longest_row(dpo) == 2 * longest_row(sft) == 2048  # a pair is run at once
    long = load_supervised([*words, "data.max_length=9000"], SFTRunConfig)
    chosen, tokens = choose_tokens(long, 24 * GB)
    assert tokens == MAX_TOKENS and chosen.actor.gradient_checkpointing == "full"
    scores = measure_model(rm.reward_model, trained=True, scores=True)
    assert scores.parameters == sizes.parameters + 1024  # its embedding has no tied LM head
    assert choose_tokens(rm, 24 * GB)[0].reward_model.gradient_checkpointing in ("none", "full")
    large = load_supervised([f"model={qwen3(tmp_path / 'l', '4B')}", "data=rows.jsonl"], SFTRunConfig)
    message = r"does not fit.*Try actor\.lora\.r=16.*set trainer\.max_tokens_per_microbatch and actor\.gradient_check"
    with pytest.raises(ConfigError, match=message):
        choose_tokens(large, 40 * GB)


def test_the_reference_that_takes_memory(tmp_path):
    words = ["model=m", "data=rows.jsonl"]
    load = lambda *more: separate_reference(load_supervised([*words, *more], DPORunConfig))
    assert load().model == "m" and load("reference.model=other").model == "other"
    assert load("actor.lora.r=4") is None and load("algo.loss_type=simpo", "algo.beta=2") is None


def test_a_supervised_run_on_a_gpu_takes_the_plan(tmp_path, monkeypatch):
    folder = save_config(tmp_path / "m", vocab_size=320)
    config = load_supervised([f"model={folder}", "data=rows.jsonl"], SFTRunConfig)
    monkeypatch.setattr(commands, "free_gpu_memory", lambda: RESERVE + 0.307 * GB)
    chosen, options = supervised._model_options(config, None)
    assert options["usual_tokens"] == 4096 and chosen.actor.gradient_checkpointing == "full"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    models = SupervisedModels(actor=chosen.actor, **{**options, "tokenizer": "byte"})
    assert models.trained.max_tokens == 4096
    models.raise_token_budget(3000)
    assert models.trained.max_tokens == 4096
    models.raise_token_budget(5000)  # as the data need
    assert models.trained.max_tokens == 5120
    models.raise_token_budget(3000)
    assert models.trained.max_tokens == 5120
    models.close()


@pytest.mark.parametrize(
    ("command", "words", "lengths"),
    [
        ("grpo", [], "prompts of 64 tokens, completions of 64"),
        ("grpo", ["max_tokens=100"], "prompts of 28 tokens, completions of 100"),
        ("grpo", ["max_prompt_length=9", "max_tokens=30"], "prompts of 9 tokens, completions of 30"),
        ("sft", ["data.max_length=999"], "rows of 128 tokens"),
        ("dpo", [], "rows of 256 tokens"),
    ],
)
def test_a_plan_has_no_longer_sequences_than_the_model(tmp_path, capsys, command, words, lengths):
    model = save_config(tmp_path, max_position_embeddings=128)
    assert main(["plan", command, f"model={model}", "memory_gb=24", *words]) == 0
    text = capsys.readouterr().out
    assert lengths in text and text.startswith("the model has 128 positions") == (words[:1] != ["max_prompt_length=9"])


def test_a_completion_that_fills_the_positions_is_refused_in_a_plan(tmp_path, capsys):
    model = save_config(tmp_path, max_position_embeddings=128)
    assert main(["plan", f"model={model}", "max_tokens=128"]) == 2
    assert "rollout.max_tokens_to_generate=128 leaves no room in 128 positions" in capsys.readouterr().err
