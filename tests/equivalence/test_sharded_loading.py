"""Of several processes only rank 0 has a whole model while it is loaded."""

import ctypes
import resource
import sys

import pytest
import torch
from processes import as_torchrun, free_port, needs_gloo, start, wait
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from whet.config import SupervisedTrainingConfig
from whet.train.supervised_models import SupervisedModels

M_MMAP_THRESHOLD = -3
"""Of mallopt: larger blocks are returned as soon as they are freed."""


def save_model(folder, width, layers):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 4 * width}
    config = LlamaConfig(vocab_size=512, hidden_size=width, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def most_memory():
    """The most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def load_twice(rank, size, folder, port):
    """Loads a tiny model, which imports and opens all that is needed, then the one that is measured."""
    as_torchrun(rank, size, port)
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: memory that was freed does not stay with the process
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    load = lambda name: SupervisedModels(
        actor=str(folder / name), tokenizer=str(folder / "tokenizer"), config=SupervisedTrainingConfig()
    )
    load("tiny")
    before = most_memory()
    models = load("model")
    peak = most_memory() - before
    weights = dict(models.trained.module.named_parameters())
    shards = sum(p.to_local().nbytes for p in weights.values() if isinstance(p, DTensor))
    torch.save((peak, shards, {n: p.full_tensor().detach() for n, p in weights.items()}), folder / f"{rank}.pt")


@needs_gloo
@pytest.mark.timeout(200)
def test_a_rank_holds_its_shards_and_one_layer_while_a_model_is_loaded(tmp_path, tokenizer):
    save_model(tmp_path / "model", 256, 36)
    save_model(tmp_path / "tiny", 16, 1)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    wait(start(2, load_twice, tmp_path, free_port()), tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    whole = sum(p.nbytes for p in saved.parameters())
    (first, *_), (peak, shards, _) = ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert first > 0.9 * whole, "rank 0 reads all of it, so the measure would show more on rank 1"
    assert 0.4 * whole < shards <= peak <= 0.6 * whole
    for _, _, weights in ranks:
        assert all(torch.equal(weights[name], p) for name, p in saved.named_parameters())
