"""The embedded engine: continuous batching in this process, on the module that is trained. Begin at engine.py.

engine.py               the protocol, and a step: schedule, run, postprocess
scheduler.py            the waiting queue, and which requests are admitted
live_rows.py            the host's record of the rows in the batch
prefix_cache.py         keys and values of finished requests, held for the next turn of their conversation
kv_cache.py             keys and values of prompts (once per group) and of completions
runner.py               prefill and decode, with the state of the rows on the device
pool_runner.py          the same on a KVPool, with captured steps: on a GPU
kv_pool.py              keys and values in one memory a layer, and attention that reads them there
places.py               ranges of a KVPool's places
growing_memory.py       memory that grows and is given back at one address
prefill.py              attention of prompts: writes and reads keys and values
layouts.py              attention of a decode step
model_forward.py        token ids -> logits: by the Hugging Face module, or by the fused backbone
fused_backbone.py       the decoder blocks of the Llama family, written out
packed_linear.py        linear layers of one input as one product, with packed weights
native_step.py          the tables that whet/native's kernels of a decode step read
cuda_graph.py           decode steps of fixed shape, replayed
sampling.py             logits -> token and logprob
engine_model.py         the model that runs: the trainer's own, or a copy
"""

from __future__ import annotations

from whet.rollout.engine.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
