"""What scripts read of TRL's and transformers' trainers and a front does not hold: from the arguments, or what to use.

Whoever asks for one of these names is told where it is here; any other name is a plain AttributeError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.errors import nearest

__all__ = ["ELSEWHERE", "attribute"]

_DATA = "rows are packed into passes as they are trained on, so there are no loaders; read train_dataset"
_LOGITS = "logits are never held; write a callback with on_evaluate"
_SEARCH = "give the arguments of each trial to a trainer of its own"
ELSEWHERE: Mapping[str, str] = {
    "_metrics": "read state.log_history, or a callback's on_log; a reward function has log_metric",
    "chat_template": "read processing_class.chat_template",
    "compute_loss_func": "write a loss for whet's learner (whet docs supervised)",
    "compute_metrics": _LOGITS,
    "current_flos": "read state.total_flos, which is 0: operations are not counted",
    "data_collator": _DATA,
    "eos_token_ids": "read model.generation_config.eos_token_id",
    "epsilon_low": "read args.epsilon",
    "eval_dataloader": _DATA,
    "generation_config": "read the arguments (temperature, top_p, max_completion_length ...), or "
    "model.generation_config",
    "hp_search_backend": _SEARCH,
    "hp_space": _SEARCH,
    "is_in_train": "write a callback: between on_train_begin and on_train_end it trains",
    "loss_types": "read args.loss_type",
    "model_init": _SEARCH,
    "optimizer_cls_and_kwargs": "read optimizer",
    "preprocess_logits_for_metrics": _LOGITS,
    "sampling_params": "read the arguments (temperature, top_p, max_completion_length ...)",
    "train_dataloader": _DATA,
    "vllm_generation": "give use_vllm=True and let the trainer sample, or sample in rollout_func",
}
"""Attribute -> what to use instead."""


def attribute(front: Any, name: str) -> Any:
    """What a front does not hold: the value of an argument of this name, which TRL's trainers have as attributes.

    Raises: AttributeError: there is none; of a name that TRL's trainers have with what to use instead.
    """
    args = vars(front).get("args")
    if args is not None and name in args.TABLE:
        return getattr(args, name)
    kind = type(front)
    instead = {**ELSEWHERE, **kind.NOT_CALLED}.get(name)
    if instead is None:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {name!r}{nearest(name, [*dir(kind), *kind.CONFIG.TABLE])}"
        )
    raise AttributeError(f"{kind.__name__} has no {name}: whet trains by its own loop; {instead}")
