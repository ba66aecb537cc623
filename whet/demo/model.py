"""The demo's models: a random model, and the one that `whet sft --config recipes/demo_sft.yaml` trained from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["random_model", "sft_model", "small_model"]

WEIGHTS = Path(__file__).with_name("sft_model.safetensors")
"""The weights of `sft_model` in bfloat16."""


def small_model(seed: int) -> Any:
    """Returns a random Qwen3 of 0.7 M parameters over bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    # initializer_range: the usual 0.02 is far too small at this width, 1 / sqrt(128) learns several times faster
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=264,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=128,
            initializer_range=0.08,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=257,
        )
    )


def random_model(folder: str, seed: int) -> str:
    """Writes the random model with its tokenizer. Returns: the folder."""
    return _save_with_tokenizer(small_model(seed), folder)


def sft_model(folder: str, seed: int) -> str:
    """Writes the model that can calculate but picks any operation next, with its tokenizer.

    recipes/demo_sft.yaml trains it from `random_model`. Its weights are stored in bfloat16, so that a demonstration of
    reinforcement learning can begin with it.

    Args:
        folder: the folder to write.
        seed: the run's seed; the weights do not depend on it.
    Returns: the folder.
    """
    from safetensors.torch import load_file

    weights = load_file(WEIGHTS)
    model = small_model(0)
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})  # tied: saved once
    return _save_with_tokenizer(model, folder)


def _save_with_tokenizer(model: Any, folder: str) -> str:
    from whet.data.tokenizer import byte_tokenizer

    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
