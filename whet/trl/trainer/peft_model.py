"""PEFT's PeftModel around a model in training, for `trainer.model`.

TRL's scripts call `trainer.model.save_pretrained`, `push_to_hub`, `merge_and_unload`, `print_trainable_parameters`: the
model in training has PEFT's layers and none of these methods. The wrapper is made without layers, around those that
exist, so that no weight is stored twice.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from whet.models.prompt_tuning import is_prompt_tuned
from whet.train.worker import ModelWorker
from whet.trl.trainer.model import unwrap_peft

__all__ = ["wrap_in_peft"]


def wrap_in_peft(worker: ModelWorker, given: Any) -> Any:
    """The model as a user has it. Args: worker: of the model in training. given: the model that the trainer was given.

    Returns: the PeftModel that was given, or one around the model; without an adapter the model itself.
    """
    module: Any = worker.module
    if given is not module and unwrap_peft(given) is module:
        return given
    adapter = worker.loaded.adapter
    by_transformers = vars(module).get("_hf_peft_config_loaded")  # add_adapter, whose save_pretrained saves it
    return (
        module
        if adapter is None or by_transformers or is_prompt_tuned(module)
        else _wrapped(worker, module, adapter.name)
    )


def _wrapped(worker: ModelWorker, module: Any, name: str) -> Any:
    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    kind: Any = peft.PeftModelForCausalLM if module.can_generate() else peft.PeftModel

    class Trained(kind):  # pyright: ignore[reportUntypedBaseClass]
        """PEFT's model, which saves what is trained: fp32, modules to save among it."""

        def prepare_model_for_gradient_checkpointing(self, model: Any) -> Any:
            """Nothing: training recomputes in a way of its own."""
            return model

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            super().save_pretrained(save_directory, *args, **kwargs)
            if kwargs.get("is_main_process", True):
                worker.export(Path(save_directory))

    Trained.__name__ = Trained.__qualname__ = kind.__name__
    takes = [(p, p.requires_grad) for p in module.parameters()]
    configs = vars(module).pop("peft_config")
    empty = peft.LoraConfig(target_modules=DUMMY_TARGET_MODULES, task_type=configs[name].task_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layers that are there already, and about what PEFT itself calls
        made = Trained(module, empty, name, autocast_adapter_dtype=False)
    made.base_model.peft_config = module.peft_config = configs
    for p, gradient in takes:
        p.requires_grad_(gradient)
    return made
