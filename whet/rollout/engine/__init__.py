"""The embedded engine: continuous batching over the trainer's own module, in this process.

engine.py               submit, step, abort, update: the protocol, and the host's bookkeeping
scheduler.py            what waits, and what is admitted
rows.py                 the live rows on the host
conversation_cache.py   keys and values of finished sequences, held for the next turn of their conversation
kv_cache.py             keys and values of prompts (once per group) and of completions
runner.py               prefill and decode, with the state of the live rows on the device
prefill.py              how attention of prompts reads and writes the keys and values
layouts.py              how that of a decode step does
forward.py              token ids -> logits: by the Hugging Face module, or by what follows
fused.py                the decoder blocks of the Llama family, written out
packed.py               linear layers of one input as one product, with packed weights
native_step.py          the tables that whet/native's kernels of a decode step read
cuda_graph.py           decode steps of fixed shape, replayed
sampler.py              logits -> token and logprob
weights.py              the model that is run: the trainer's own, or a copy
"""

from __future__ import annotations

from whet.rollout.engine.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
