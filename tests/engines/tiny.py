"""Tiny random models whose logits aren't flat, and requests for them."""

from __future__ import annotations

import numpy as np
import torch
import transformers as tf

from whet.rollout.base import Output, Request, RolloutEngine, Sampling

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 16,  # and the other widths: multiples of what the native kernels take
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": None,
}
FORMS = {"native": {}, "torch": {"native": False}, "module": {"fast": False}}
"""The ways of the embedded engine: options by name."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
SINKS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LATENT = {
    "head_dim": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "deepseek_v3_value_size": (tf.DeepseekV3Config, LATENT),
    "qwen3": (tf.Qwen3Config, {}),
    "qwen2": (tf.Qwen2Config, {}),
    "llama": (tf.LlamaConfig, {}),
    "gemma2": (tf.Gemma2Config, {"sliding_window": 6}),
    "gemma3": (tf.Gemma3TextConfig, {"sliding_window": 6}),
    "mistral_window": (tf.MistralConfig, {"sliding_window": 5}),
    "qwen3_moe": (tf.Qwen3MoeConfig, MOE),
    "gpt_oss": (tf.GptOssConfig, SINKS),
}


def build(family: str = "qwen3", seed: int = 0, gain: float = 6.0, **fields):
    """A causal language model with weights scaled up, in fp32."""
    config, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config(**{**COMMON, **own, **fields}), attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(gain)
            else:
                p.add_(torch.randn_like(p) * 0.1)
    return model.eval()


def prompts(lengths=(3, 9, 40, 9, 1)) -> list[np.ndarray]:
    """Random prompts of these lengths."""
    return [np.random.RandomState(i).randint(1, VOCABULARY, n).astype(np.int32) for i, n in enumerate(lengths)]


def requests(tokens: list[np.ndarray], sampling: Sampling, group: int = 1, seed: int = 0) -> list[Request]:
    """`group` requests per prompt; ids count up."""
    return [
        Request(id=i * group + g, tokens=p, sampling=sampling, group=i, rng_key=(seed, 0, i, g))
        for i, p in enumerate(tokens)
        for g in range(group)
    ]


def drain(engine: RolloutEngine) -> dict[int, Output]:
    """Calls step until the engine is at rest."""
    done: dict[int, Output] = {}
    while outputs := engine.step():
        for o in outputs:
            assert o.id not in done
            done[o.id] = o
    return done


def run(engine: RolloutEngine, work: list[Request]) -> dict[int, Output]:
    """Submits and drains."""
    engine.submit(work)
    return drain(engine)


def letters(ids) -> str:
    """A decode function: one letter per id."""
    return "".join(chr(48 + i) for i in ids)
