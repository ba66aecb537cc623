"""Wraps the model in training in PEFT's PeftModel, for `trainer.model`.

TRL's scripts call `trainer.model.save_pretrained`, `push_to_hub`, `merge_and_unload`, `print_trainable_parameters`. The
model in training has PEFT's layers but none of these methods. The wrapper adds no layers, so no weight is stored twice.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from whet.models.prompt_tuning import is_prompt_tuned
from whet.train.worker import ModelWorker
from whet.trl.trainer.model import unwrap_peft
from whet.util.tensor_subclasses import is_sharded

__all__ = ["wrap_in_peft"]


def wrap_in_peft(worker: ModelWorker, original: Any) -> Any:
    """Returns the model for users: a PeftModel if there is an adapter, else the model itself.

    Args: worker: has the model in training. original: the model that the user passed to the trainer.
    """
    module: Any = worker.module
    if original is not module and unwrap_peft(original) is module:
        return original
    adapter = worker.loaded.adapter
    has_save = vars(module).get("_hf_peft_config_loaded")  # after add_adapter, save_pretrained saves the adapter
    if adapter is None or has_save or is_prompt_tuned(module):
        return module

    import peft
    from peft.utils.constants import DUMMY_TARGET_MODULES

    kind: Any = peft.PeftModelForCausalLM if module.can_generate() else peft.PeftModel

    class TrainedPeftModel(kind):  # pyright: ignore[reportUntypedBaseClass]
        """PEFT's model. save_pretrained writes the trained fp32 weights, modules_to_save included; of several processes
        all must call it.
        """

        def prepare_model_for_gradient_checkpointing(self, model: Any) -> Any:
            """Does nothing: whet's training checkpoints activations itself."""
            return model

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            is_divided = any(map(is_sharded, module.parameters()))
            if not is_divided:
                super().save_pretrained(save_directory, *args, **kwargs)
            if is_divided or kwargs.get("is_main_process", True):
                worker.export(Path(save_directory))

    TrainedPeftModel.__name__ = TrainedPeftModel.__qualname__ = kind.__name__
    requires_grad = [(p, p.requires_grad) for p in module.parameters()]
    configs = vars(module).pop("peft_config")
    empty = peft.LoraConfig(target_modules=DUMMY_TARGET_MODULES, task_type=configs[adapter.name].task_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about existing layers, and PEFT's own deprecated calls
        wrapper = TrainedPeftModel(module, empty, adapter.name, autocast_adapter_dtype=False)
    wrapper.base_model.peft_config = module.peft_config = configs
    for p, value in requires_grad:
        p.requires_grad_(value)
    return wrapper
