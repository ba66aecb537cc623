"""The fields and checks that SFTConfig, DPOConfig, KTOConfig and RewardConfig share."""

from __future__ import annotations

from whet.compat.field import Table, differs, no_effect, refused, works
from whet.errors import ConfigError, lookup_error
from whet.trl.config.arguments import Arguments

__all__ = ["MODEL_FIELDS", "NO_DROPOUT", "ON_LONG", "SUPERVISED_FIELDS", "TEMPLATE_FIELDS", "SupervisedArguments"]

ON_LONG = {"keep_start": "truncate", "keep_end": "truncate_left"}
"""truncation_mode -> whet's treatment of rows over max_length."""

SUPERVISED_FIELDS: Table = {
    "per_device_train_batch_size": works(
        8,
        "rows of each process; times gradient_accumulation_steps and the processes "
        "they are an update. max_tokens_per_microbatch decides how many run "
        "through the model at once",
    ),
    "num_train_epochs": works(3.0),
    "max_steps": works(-1),
    "gradient_accumulation_steps": differs(
        1, "a loss is one mean over the update; a TRL loss over rows is a mean of its micro-batches' means"
    ),
    "label_smoothing_factor": refused(0.0, "deprecated in TRL; DPO has label_smoothing", harmless=(0,)),
    "use_cache": no_effect(False, "training keeps no KV cache"),
    "neftune_noise_alpha": refused(None, "noise on embeddings is not supported; leave it out", float),
    "logging_steps": works(10, "a value below 1 is a share of all steps", float),
    "eval_steps": works(None, kind=float),
    "save_steps": works(500, kind=float),
    "per_device_eval_batch_size": differs(8, "a loss is one mean over the set; TRL's is a mean over batches"),
    "prediction_loss_only": no_effect(False, "an evaluation logs the loss and the metrics of training"),
    "include_for_metrics": refused([], "compute_metrics receives predictions and label_ids only", list[str]),
    "batch_eval_metrics": works(False),
    "dataloader_drop_last": differs(
        False, "drops an epoch's last update if it is not full; TRL drops the last micro-batch"
    ),
    "remove_unused_columns": no_effect(True, "unused columns are never kept"),
    "label_names": no_effect(None, "the rows' columns decide what is trained", list[str]),
    "train_sampling_strategy": differs(
        "random", "random or sequential; whet's generator draws the order from the seed"
    ),
}
"""Fields of transformers that differ from reinforcement learning."""

MODEL_FIELDS: Table = {
    "model_init_kwargs": differs(
        None,
        "dtype (or torch_dtype) sets the dtype of saved weights, by default float32; "
        "float16 is that of the parameters too, else bf16 sets theirs. Master weights are "
        "fp32. device_map, attn_implementation, low_cpu_mem_usage and use_safetensors "
        "have no effect; others are refused",
        dict,
    ),
    "trust_remote_code": works(False, "runs the Python files in the model's folder"),
    "router_aux_loss_coef": refused(
        None, "the router's auxiliary loss is not added; leave it out", float, harmless=(0.0, 0)
    ),
    "pad_to_multiple_of": no_effect("auto", "nothing is padded", str),
    "pad_token": no_effect(None, "set on the tokenizer; nothing is padded", str),
    "dataset_num_proc": no_effect(None, "rows are encoded in this process", int),
    "activation_offloading": no_effect(False, "gradient_checkpointing saves the same memory"),
}
"""Fields on the model and the rows, which all four configurations have."""
TEMPLATE_FIELDS: Table = {
    "chat_template_path": differs(
        None,
        "a .jinja file, or a tokenizer without tokens that the model's tokenizer lacks: embeddings are not resized",
        str,
    ),
    "eos_token": works(None, kind=str),
}
"""Fields on the chat template, in SFTConfig and RewardConfig."""
NO_DROPOUT = no_effect(True, "the model's dropout is always off; an adapter's dropout is its lora_dropout")
"""The field disable_dropout."""


class SupervisedArguments(Arguments):
    """The base of the configurations of supervised training."""

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support."""
        super()._check()
        if "truncation_mode" in self.TABLE and self.truncation_mode not in ON_LONG:
            raise lookup_error("truncation_mode", self.truncation_mode, ON_LONG)
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ConfigError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not supported: whet packs rows and never "
                "pads, so grouping by length has no use; set 'random' or 'sequential'"
            )
