import dataclasses

import numpy as np
import pytest
import torch
import transformers

from whet.errors import ConfigError
from whet.models import forward
from whet.models.forward import token_stats
from whet.models.heads import Head
from whet.models.load import load_model
from whet.ops.logits_processors import LogitsProcessors, process_logits
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.types import Completion, Group, Prompt, TokenBatch
from whet.types.loss import CONSTANTS

VOCAB = 30


def tiny(family="Llama", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5) if p.dim() > 1 else p.add_(0.1)
    return model


def batch():
    rng = np.random.default_rng(0)

    def group(p, lengths):
        made = [
            Completion(
                tokens=rng.integers(0, VOCAB, n),
                logprobs=np.zeros(n),
                versions=np.zeros(n),
                finish_reason="stop",
                generation=g,
            )
            for g, n in enumerate(lengths)
        ]
        return Group(prompt=Prompt(tokens=rng.integers(0, VOCAB, p), source=""), completions=tuple(made))

    return TokenBatch.from_groups([group(4, [3, 8, 1]), group(1, [5]), group(9, [2, 2])])


BATCH = batch()


def oracle(model, processors, head=lambda x: x):
    """Token by token from transformers' own logits: [S] logprobs and entropies."""
    model.set_attn_implementation("eager")
    logprobs, entropies = [], []
    for i in range(BATCH.num_sequences):
        end = int(BATCH.ends[i])
        completion = BATCH.tokens[end - int(BATCH.lengths[i]) : end]
        ids = torch.cat([BATCH.prefix(i), completion])
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        for t, token in enumerate(completion.tolist()):
            place = len(BATCH.prefix(i)) + t
            seen = torch.zeros(1, VOCAB, dtype=torch.bool)
            seen[0, ids[:place]] = True
            z = process_logits(
                logits[place - 1 : place], processors, seen=seen, position=torch.tensor([t]), keep=torch.tensor([token])
            )
            logp = z.log_softmax(-1)[0]
            logprobs.append(logp[token])
            finite = logp[logp > -torch.inf]
            entropies.append(-(finite.exp() * finite).sum())
    model.set_attn_implementation("whet")
    return torch.stack(logprobs), torch.stack(entropies)


def run(loaded, processors=LogitsProcessors(), entropy=True, **plan):
    logprobs, entropies = torch.zeros(2, BATCH.num_tokens)
    for micro in plan_micro_batches(BATCH, **{"max_tokens": 1000, **plan}):
        stats = token_stats(loaded, micro, processors=processors, entropy=entropy)
        (stats.logprobs.sum() + (0 if stats.entropy is None else stats.entropy.sum())).backward()
        logprobs[micro.token_index] = stats.logprobs.detach().float()
        if entropy:
            entropies[micro.token_index] = stats.entropy.detach().float()
    grad = loaded.module.model.embed_tokens.weight.grad.clone()
    loaded.module.zero_grad()
    return logprobs, entropies, grad


SUPPORTS = {
    "temperature": LogitsProcessors(temperature=0.6),
    "greedy is scored at temperature 1": LogitsProcessors(temperature=0.0),
    "full leaves the truncation out": LogitsProcessors(temperature=0.6, top_k=2, full=True),
    "top-k": LogitsProcessors(top_k=4),
    "top-p, min-p": LogitsProcessors(top_p=0.7, min_p=0.05, temperature=1.4),
    "repetition penalty": LogitsProcessors(repetition_penalty=1.7),
    "forbidden, min tokens": LogitsProcessors(forbidden_ids=(3, 4), min_tokens=3, stop_ids=(1,)),
    "all at once": LogitsProcessors(
        repetition_penalty=1.3, top_k=9, top_p=0.9, temperature=0.8, min_tokens=2, stop_ids=(1,)
    ),
}


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", SUPPORTS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_logprobs_and_entropies_are_of_the_distribution_drawn_from(name, family):
    processors = SUPPORTS[name]
    model = tiny(family, **({"final_logit_softcapping": 2.0, "head_dim": 8} if family == "Gemma2" else {}))
    loaded = load_model(model)
    want, entropies = oracle(model, processors)
    (want.sum() + entropies.sum()).backward()
    want_grad = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    got, got_entropies, grad = run(loaded, processors)
    torch.testing.assert_close(got, want.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropies, entropies.detach(), atol=1e-5, rtol=1e-5)
    assert (grad - want_grad).abs().max() < 1e-4 * want_grad.abs().max()
    assert got.isfinite().all()


def test_chunks_and_their_recomputation_change_nothing(monkeypatch):
    loaded = load_model(tiny())
    for processors in (SUPPORTS["temperature"], SUPPORTS["all at once"]):
        whole = run(loaded, processors)
        monkeypatch.setattr(forward, "MAX_KEPT_BYTES", 0)
        monkeypatch.setattr(forward, "CHUNK_BYTES", 3 * VOCAB * 4)
        parts = run(loaded, processors)
        monkeypatch.undo()
        for a, b in zip(whole, parts):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_padded_rows_give_the_same_under_every_support():
    model = tiny()
    loaded = load_model(model)
    for processors in SUPPORTS.values():
        want = run(loaded, processors)
        model.set_attn_implementation("sdpa")
        got = run(loaded, processors, packable=False, max_tokens=40)
        model.set_attn_implementation("whet")
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_an_unknown_head_goes_through_the_models_own_logits():
    model = tiny("Cohere", logit_scale=0.3)
    loaded = load_model(model)
    assert loaded.lm_head.kind == "scale"
    unknown = type(loaded)(model, True, (), Head("unknown"), "cohere")
    for processors in (LogitsProcessors(temperature=0.5), SUPPORTS["all at once"]):
        for a, b in zip(run(loaded, processors), run(unknown, processors)):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_bf16_weights_give_fp32_logprobs_near_the_fp32_ones():
    model = tiny(dtype=torch.bfloat16)
    wide = tiny()
    wide.load_state_dict(model.state_dict())
    got, _, _ = run(load_model(model))
    want, _, _ = run(load_model(wide))
    micro = plan_micro_batches(BATCH, max_tokens=1000)[0]
    assert token_stats(load_model(model), micro).logprobs.dtype == torch.float32
    assert (got - want).abs().mean() < 0.1


def test_float64_stays_float64():
    micro = plan_micro_batches(BATCH, max_tokens=1000)[0]
    loaded = load_model(tiny(dtype=torch.float64))
    for processors in (LogitsProcessors(), LogitsProcessors(top_k=3)):
        assert token_stats(loaded, micro, processors=processors, entropy=True).entropy.dtype == torch.float64


def test_what_a_repetition_penalty_needs_reads_nothing_from_the_device():
    micro = plan_micro_batches(BATCH, max_tokens=1000)[0]
    first, before = forward._first_places(micro.to("meta"), VOCAB)  # a number of this device can't be read
    assert first.shape == (len(micro.sequences), VOCAB) and before.shape == micro.position.shape


def test_values_are_of_the_state_before_each_token():
    model = tiny()
    critic = load_model(model, role="critic")
    with torch.no_grad():
        critic.score_head.weight.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    got = torch.full((BATCH.num_tokens,), torch.nan)
    for micro in plan_micro_batches(BATCH, max_tokens=25):
        stats = token_stats(critic, micro)
        assert stats.logprobs is None and stats.entropy is None and stats.values.requires_grad
        assert stats.values._base is None, "FSDP would warn of a view"
        got[micro.token_index] = stats.values.detach()
    model.set_attn_implementation("eager")
    want = []
    for i, (end, n) in enumerate(zip(BATCH.ends.tolist(), BATCH.lengths.tolist())):
        ids = torch.cat([BATCH.prefix(i), BATCH.tokens[end - n : end]])
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -n - 1 : -1]
        want.append(critic.score_head(hidden)[:, 0])
    torch.testing.assert_close(got, torch.cat(want).detach(), atol=1e-5, rtol=1e-5)


def test_packed_rows_for_a_model_that_takes_none_are_refused():
    loaded = load_model(tiny("Falcon", num_kv_heads=1))
    micro = plan_micro_batches(BATCH, max_tokens=1000)[0]
    with pytest.raises(ConfigError, match="build the micro-batches with packable=False"):
        token_stats(loaded, micro)


@pytest.mark.parametrize("name", ["temperature", "repetition penalty"])
@pytest.mark.parametrize("held", [0, 10**9])
def test_constants_are_of_the_distribution_drawn_from(name, held, monkeypatch):
    monkeypatch.setattr("whet.models.forward.MAX_KEPT_BYTES", held)
    loaded, processors = load_model(tiny()), SUPPORTS[name]
    (micro,) = plan_micro_batches(BATCH, max_tokens=1000)
    other = lambda v: dataclasses.replace(micro, targets=torch.full_like(micro.targets, v))
    logp = torch.stack([token_stats(loaded, other(v), processors=processors).logprobs for v in range(VOCAB)], 1)
    best = dataclasses.replace(micro, targets=torch.where(micro.position == 0, logp.argmax(1), micro.targets))
    got = token_stats(loaded, best, processors=processors, constants=CONSTANTS)
    assert got.correct.tolist() == (best.targets == logp.argmax(1)).tolist()
    torch.testing.assert_close(got.log_sum_sq_probs, (2 * logp).logsumexp(1).detach(), atol=1e-5, rtol=1e-5)
    assert not (got.log_sum_sq_probs.requires_grad or got.mean_logits.requires_grad)
    if name == "temperature":
        plain = token_stats(loaded, best, constants=CONSTANTS).mean_logits
        torch.testing.assert_close(got.mean_logits, plain / processors.temperature, atol=1e-5, rtol=1e-5)
