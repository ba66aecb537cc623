"""Starting models of recipes in several turns: a random model learns by SFT to speak its part."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["conversation_model"]


def conversation_model(
    folder: str,
    seed: int,
    conversation: Callable[[random.Random], list[dict[str, Any]]],
    *,
    steps: int,
    batch_size: int,
    chat_template: str | None = None,
) -> str:
    """Trains a model of 0.1 M parameters over bytes by SFT on conversations.

    Args:
        folder: the folder to write; if it already has the model, nothing is trained.
        seed: the seed of the model and the conversations.
        conversation: draws one, as a list of messages.
        steps, batch_size: the optimizer steps, and the conversations of each.
        chat_template: of the tokenizer; None = that of byte_tokenizer, which has no tools.
    Returns: the folder.
    """
    from whet.config import OptimConfig, SupervisedDataConfig
    from whet.data.supervised import SFTEncoder
    from whet.data.tokenizer import byte_tokenizer
    from whet.models.load import load_model
    from whet.ops import nll
    from whet.train.role_trainer import RoleTrainer
    from whet.train.worker import ModelWorker
    from whet.types import TokenBatch

    if (Path(folder) / "sft_model.txt").is_file():
        return folder
    optim = OptimConfig(lr=3e-3, schedule="cosine", warmup_steps=30, total_steps=steps)
    worker, tokenizer = ModelWorker(load_model(_model(seed)), optim=optim), byte_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    encode = SFTEncoder(tokenizer, SupervisedDataConfig())
    trainer, draw = RoleTrainer(worker, loss=nll), random.Random(seed)
    for step in range(1, steps + 1):
        examples = [encode({"messages": conversation(draw)}, n) for n in range(batch_size)]
        metrics = trainer.update(TokenBatch.from_examples([e for e in examples if e is not None]))
        if step % 100 == 0:
            logging.getLogger("whet").info("starting model: step %d/%d  loss %.3f", step, steps, metrics["loss"].value)
    worker.export(Path(folder), tokenizer)
    (Path(folder) / "sft_model.txt").write_text(f"seed {seed}, {steps} steps\n")
    return folder


def _model(seed: int) -> Any:
    """Returns a random Qwen3 over bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    more = {"initializer_range": 0.12, "tie_word_embeddings": True, "vocab_size": 264, "rope_parameters": rope}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ends, **more))
