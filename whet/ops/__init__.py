"""Pure maths of reinforcement learning on token sequences: torch in, torch out.

Nothing here knows of models, data sets, devices or configurations; only torch, whet.types and whet.errors are imported.
"""

from whet.ops.logprobs import entropy, selective_log_softmax
from whet.ops.support import Support, draw, greedy, support_logits
from whet.ops.uniform import address_key, uniform

__all__ = [
    "Support",
    "address_key",
    "draw",
    "entropy",
    "greedy",
    "selective_log_softmax",
    "support_logits",
    "uniform",
]
