"""Methods and attributes of TRL's and transformers' trainers that whet.trl lacks, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whet.errors import nearest

__all__ = ["ATTRIBUTES", "NOT_CALLED", "missing_attribute"]

_LOOP = "use arguments, callbacks or a learner of your own (whet docs extending)"
_DATA = "rows are packed into passes as they are trained on, so there are no loaders; read train_dataset"
_LOGITS = "logits are not kept; write a callback with on_evaluate"
NOT_CALLED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "_get_eval_sampler",
            "_get_train_sampler",
            "_load_from_checkpoint",
            "_maybe_log_save_evaluate",
            "_save",
            "_wrap_model",
            "compute_ref_log_probs",
            "evaluation_loop",
            "get_batch_samples",
            "get_decay_parameter_names",
            "get_optimizer_cls_and_kwargs",
            "get_test_dataloader",
            "hyperparameter_search",
            "predict",
        ),
        _LOOP,
    ),
    "_inner_training_loop": "give callbacks",
    "_prepare_inputs": "give the rows as they are to be trained on",
    "_save_checkpoint": "give a callback with on_save",
    "create_optimizer": "pass optimizers=(optimizer, scheduler), or set optim",
    "create_optimizer_and_scheduler": "pass optimizers=(optimizer, scheduler), or set optim",
    "create_scheduler": "set lr_scheduler_type and lr_scheduler_kwargs",
    "get_eval_dataloader": "give eval_dataset",
    "get_train_dataloader": "give train_dataset in the order of training, with shuffling off",
    "prediction_step": "write a callback with on_evaluate",
    "training_step": "give callbacks",
}
"""Method that recipes override and whet's loop does not call -> the alternative."""
ATTRIBUTES: Mapping[str, str] = {
    "_metrics": "read state.log_history, or a callback's on_log; a reward function has log_metric",
    "chat_template": "read processing_class.chat_template",
    "compute_loss_func": "write a loss for whet's learner (whet docs supervised)",
    "compute_metrics": _LOGITS,
    "data_collator": _DATA,
    "eval_dataloader": _DATA,
    "generation_config": "read the arguments (temperature, top_p, max_completion_length ...), or "
    "model.generation_config",
    "hp_space": "give the arguments of each trial to a trainer of its own",
    "preprocess_logits_for_metrics": _LOGITS,
    "sampling_params": "read the arguments (temperature, top_p, max_completion_length ...)",
    "train_dataloader": _DATA,
    "vllm_generation": "give use_vllm=True and let the trainer sample, or sample in rollout_func",
}
"""Attribute that scripts read -> the alternative."""
_ARGUMENT_OF = {
    "epsilon_low": "epsilon",
    "loss_types": "loss_type",
    "precompute_ref_logps": "precompute_ref_log_probs",
}
"""Attribute of TRL's trainers with another name than its argument -> the argument."""


def missing_attribute(trainer: Any, name: str) -> Any:
    """Returns the argument of this name: TRL's trainers have arguments as attributes too.

    Raises: AttributeError: no such argument; for a name of TRL's trainers, the message has the alternative.
    """
    args, argument = vars(trainer).get("args"), _ARGUMENT_OF.get(name, name)
    if args is not None and argument in args.TABLE:
        return getattr(args, argument)
    kind = type(trainer)
    instead = {**ATTRIBUTES, **kind.NOT_CALLED}.get(name)
    if instead is None:
        raise AttributeError(
            f"{kind.__name__!r} object has no attribute {name!r}{nearest(name, [*dir(kind), *kind.CONFIG.TABLE])}"
        )
    raise AttributeError(f"{kind.__name__} has no {name}: whet trains by its own loop; {instead}")
