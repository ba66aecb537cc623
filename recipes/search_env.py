"""The environment of search.yaml: a corpus that the model has to look things up in, two turns long.

A question names a key; the model searches for one, is given its entry, and answers with the value. So an answer is
right where the search was: `reward_fn` looks at the answer alone. The pupil, taught by imitation, knows both turns, but
searches for the key backwards two times of three.
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
    """The entry of the key that was searched for; nothing where there was no search."""
    found = SEARCH.search(messages[-1]["content"])
    return [] if found is None else [{"role": "tool", "content": CORPUS.get(found[1], "nothing")}]


def reward_fn(messages: list[dict[str, Any]], answer: str) -> float:
    """1 where the last answer is the right one."""
    said = ANSWER.findall(messages[-1]["content"])
    return float(bool(said) and said[-1] == answer)


def _rows(keys: list[str]) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"{key}?"}], "answer": CORPUS[key]} for key in keys]


def train_rows() -> list[dict[str, Any]]:
    """Questions of 500 keys."""
    return _rows(KEYS[:500])


def test_rows() -> list[dict[str, Any]]:
    """Questions of 128 other keys."""
    return _rows(KEYS[500:628])


def pupil(folder: str, seed: int, *, steps: int = 500, batch_size: int = 32) -> str:
    """A model of 0.1 M parameters, taught by conversations: in two of three the key is searched for backwards.

    Args: folder: where it is written; one that is there is taken as it is. seed: of the model and the conversations.
        steps, batch_size: of training.
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

    if (Path(folder) / "pupil.txt").is_file():
        return folder
    optim = OptimConfig(lr=3e-3, schedule="cosine", warmup_steps=30, total_steps=steps)
    worker = ModelWorker(load_model(_model(seed)), optim=optim)
    encode = SFTEncoder(byte_tokenizer(), SupervisedDataConfig())
    trainer, draw = RoleTrainer(worker, loss=nll), random.Random(seed)
    for step in range(1, steps + 1):
        examples = [encode({"messages": _shown(draw)}, n) for n in range(batch_size)]
        found = trainer.update(TokenBatch.from_examples([e for e in examples if e is not None]))
        if step % 100 == 0:
            logging.getLogger("whet").info("pupil: step %d/%d  loss %.3f", step, steps, found["loss"].value)
    worker.export(Path(folder), byte_tokenizer())
    (Path(folder) / "pupil.txt").write_text(f"seed {seed}, {steps} steps\n")
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


def _shown(draw: random.Random) -> list[dict[str, Any]]:
    """A conversation of the pupil's: any key is asked for, and searched for as it is or backwards."""
    asked = "".join(draw.choices(ascii_lowercase, k=2))
    searched = asked if draw.random() < 1 / 3 else asked[::-1]
    value = str(draw.randrange(100, 1000))  # not the corpus's: what is learned is to read
    return [
        {"role": "user", "content": f"{asked}?"},
        {"role": "assistant", "content": f"<search>{searched}</search>"},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"<answer>{value}</answer>"},
    ]
