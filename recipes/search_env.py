"""The environment of search.yaml: the model looks up a key in a small corpus, in two turns.

A question names a key. The model searches for a key, receives its entry, and answers with the value. The answer is
right if the search was right, so `reward_fn` reads only the answer. The starting model, trained by SFT, knows both
turns, but two times out of three it searches for the reversed key.
"""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from string import ascii_lowercase
from typing import Any

_DRAW = random.Random(0)
CORPUS = {a + b: str(_DRAW.randrange(100, 1000)) for a in ascii_lowercase for b in ascii_lowercase}
"""Key -> value: 676 entries."""
KEYS = _DRAW.sample(sorted(CORPUS), len(CORPUS))
SEARCH = re.compile(r"<search>(.*?)</search>")
ANSWER = re.compile(r"<answer>(.*?)</answer>")


def interact(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entry of the key in the search, or no message if there was no search."""
    match = SEARCH.search(messages[-1]["content"])
    return [] if match is None else [{"role": "tool", "content": CORPUS.get(match[1], "nothing")}]


def reward_fn(messages: list[dict[str, Any]], answer: str) -> float:
    """1 if the last answer is right, else 0."""
    answers = ANSWER.findall(messages[-1]["content"])
    return float(bool(answers) and answers[-1] == answer)


def _rows(keys: list[str]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"{key}?"}], "answer": CORPUS[key]} for key in keys]


def train_rows() -> list[dict[str, Any]]:
    """Questions about 500 keys."""
    return _rows(KEYS[:500])


def test_rows() -> list[dict[str, Any]]:
    """Questions about 128 other keys."""
    return _rows(KEYS[500:628])


def sft_model(folder: str, seed: int, *, steps: int = 500, batch_size: int = 32) -> str:
    """Trains a model of 0.1 M parameters by SFT; in two of three conversations the search has the reversed key.

    Args:
        folder: the folder to write; if it already has the model, nothing is trained.
        seed: the seed of the model and the conversations.
        steps, batch_size: the optimizer steps, and the conversations of each.
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
    worker = ModelWorker(load_model(_model(seed)), optim=optim)
    encode = SFTEncoder(byte_tokenizer(), SupervisedDataConfig())
    trainer, draw = RoleTrainer(worker, loss=nll), random.Random(seed)
    for step in range(1, steps + 1):
        examples = [encode({"messages": _conversation(draw)}, n) for n in range(batch_size)]
        metrics = trainer.update(TokenBatch.from_examples([e for e in examples if e is not None]))
        if step % 100 == 0:
            logging.getLogger("whet").info("starting model: step %d/%d  loss %.3f", step, steps, metrics["loss"].value)
    worker.export(Path(folder), byte_tokenizer())
    (Path(folder) / "sft_model.txt").write_text(f"seed {seed}, {steps} steps\n")
    return folder


def _model(seed: int) -> Any:
    """A random Qwen3 over bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 160}
    ends = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    more = {"initializer_range": 0.12, "tie_word_embeddings": True, "vocab_size": 264, "rope_parameters": rope}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **ends, **more))


def _conversation(draw: random.Random) -> list[dict[str, Any]]:
    """A training conversation: a question about any key, and a search for the key or the reversed key."""
    asked = "".join(draw.choices(ascii_lowercase, k=2))
    searched = asked if draw.random() < 1 / 3 else asked[::-1]
    value = str(draw.randrange(100, 1000))  # not the value in the corpus: the model learns to copy, not to remember
    return [
        {"role": "user", "content": f"{asked}?"},
        {"role": "assistant", "content": f"<search>{searched}</search>"},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"<answer>{value}</answer>"},
    ]
