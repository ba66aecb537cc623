"""The embedded engine: continuous batching over the trainer's own module, in this process.

engine.py    submit, poll, abort, update: the protocol, and the host's books
scheduler.py what waits, and what is let in
kv_cache.py  keys and values of prompts (once per group) and of completions
runner.py    prefill and decode forwards through the Hugging Face module
sampler.py   logits -> token and logprob
"""

from __future__ import annotations

from whet.rollout.engine.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
