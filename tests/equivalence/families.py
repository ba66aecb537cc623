"""Tiny random models of many families, and random batches, for the equality tests."""

import numpy as np
import torch
import transformers

from whet.types import Completion, Group, Prompt, TokenBatch

VOCAB = 64
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# windows of 5 are shorter than the sequences, caps are low enough to bend
PACKABLE = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Llama": {},
    "Gemma2": dict(GEMMA, attn_logit_softcapping=2.0),
    "Gemma3Text": GEMMA,
    "Mistral": {"sliding_window": 5},
    "Qwen3Moe": MOE,
    "GptOss": {"head_dim": 8, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Cohere": {},
    "Phi": {},
}
REFUSED = {
    "Mamba": {},
    "Bloom": {"n_head": 4, "n_layer": 2},
    "Falcon": {},
    "StableLm": {},
    "Qwen3Next": dict(
        MOE,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}


def tiny(family, dtype=torch.float32, **changes):
    """A model of a family whose logits are far from flat: small default weights would hide caps, sinks and windows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **{**PACKABLE, **REFUSED}[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.to(dtype)


def groups(*shapes, seed=0, mask=False):
    """A TokenBatch of random ids; a shape is (prompt length, completion lengths)."""
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(2, VOCAB, n)
    made = []
    for p, lengths in shapes:
        completions = []
        for g, n in enumerate(lengths):
            versions = rng.integers(-1, 1, n) if mask else np.zeros(n, dtype=int)
            completions.append(
                Completion(tokens=ids(n), logprobs=np.zeros(n), versions=versions, finish_reason="stop", generation=g)
            )
        made.append(Group(prompt=Prompt(tokens=ids(p), source=""), completions=tuple(completions)))
    return TokenBatch.from_groups(made)


BATCH = groups((5, [3, 9, 1, 14]), (12, [8, 4]), (2, [7]), (1, [6, 6, 6]), mask=True)


def one_by_one(model, batch, attention="eager"):
    """The oracle: transformers' own forward on each sequence alone, [S] logprobs with gradient."""
    before = model.config._attn_implementation
    if attention and before != attention:
        model.set_attn_implementation(attention)
    out = []
    for i, (end, n) in enumerate(zip(batch.ends.tolist(), batch.lengths.tolist())):
        prefix, completion = batch.prefix(i), batch.tokens[end - n : end]
        logits = model(input_ids=torch.cat([prefix, completion])[None], use_cache=False).logits[0]
        logp = logits[len(prefix) - 1 : -1].log_softmax(-1)
        out.append(logp.gather(1, completion[:, None]).squeeze(1))
    if attention and before != attention:
        model.set_attn_implementation(before)
    return torch.cat(out)


def gradients(model):
    """The gradients by name, cleared from the model."""
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out


def worst(got, want):
    """Largest difference of any gradient tensor relative to that tensor's largest entry."""
    assert got.keys() == want.keys() and len(want) > 3
    scale = max(w.abs().max().item() for w in want.values())
    # a tensor that is 0 but for rounding (a key bias) is measured against the largest of all
    return max(((got[k] - w).abs().max() / max(w.abs().max().item(), 1e-4 * scale)).item() for k, w in want.items())
