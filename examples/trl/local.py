"""Local replacements for downloads from the hub: a tiny random model, rows in the format of GSM8K, and settings so
small that a script takes seconds on a CPU.

In a real run the model is a name on the hub, the rows are `load_dataset("openai/gsm8k", "main", split="train")`, and
SMALL is left out. TRL needs the last two entries of SMALL on a machine without a GPU.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from whet.data.tokenizer import byte_tokenizer

__all__ = ["SMALL", "gsm8k", "tiny_model"]

SMALL = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
}
"""Of a GRPOConfig."""


def tiny_model() -> str:
    """A new folder with a random Qwen3 over bytes and its tokenizer, which has a chat template."""
    folder = tempfile.mkdtemp(prefix="tiny-qwen3-")
    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def gsm8k(count: int = 4) -> Dataset:
    """Problems with columns `question` and `answer`, the number after ####."""
    made = []
    for i in range(count):
        first, second = 3 + i, 2 * i + 1
        made.append(
            {
                "question": f"Ada has {first} pens and buys {second} more. How many?",
                "answer": f"She has {first} + {second} = <<{first}+{second}={first + second}>>{first + second} pens."
                f"\n#### {first + second}",
            }
        )
    return Dataset.from_list(made)
