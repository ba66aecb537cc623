"""InferenceWorker: Tunix's name for the models that are only read."""

from __future__ import annotations

from typing import Any

__all__ = ["InferenceWorker"]


class InferenceWorker:
    """The models that are only read, behind Tunix's verbs.

    Args: cluster: the RLCluster whose reference and critic they are.
    """

    def __init__(self, cluster: Any) -> None:
        self.get_ref_per_token_logps = cluster.get_ref_per_token_logps
        self.get_values = cluster.get_values
