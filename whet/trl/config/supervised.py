"""The fields and checks that SFTConfig, DPOConfig, KTOConfig and RewardConfig share."""

from __future__ import annotations

from whet.errors import ConfigError, lookup_error
from whet.fronts.field import Table, inert, other, refused, works
from whet.trl.config.arguments import Arguments

__all__ = ["MODEL_FIELDS", "NO_DROPOUT", "ON_LONG", "SUPERVISED_FIELDS", "TEMPLATE_FIELDS", "SupervisedArguments"]

ON_LONG = {"keep_start": "truncate", "keep_end": "truncate_left"}
"""truncation_mode -> what becomes of rows over max_length."""

SUPERVISED_FIELDS: Table = {
    "per_device_train_batch_size": works(8, "rows, with accumulation of an update; how many run through the model at "
                                            "once is max_tokens_per_microbatch's to say"),
    "num_train_epochs": works(3.0),
    "max_steps": works(-1),
    "gradient_accumulation_steps": other(1, "one update, weighed as a whole: where losses are means over rows, TRL "
                                            "takes the mean of the means of its micro-batches"),
    "label_smoothing_factor": refused(0.0, "deprecated there; DPO has label_smoothing", harmless=(0,)),
    "use_cache": inert(False, "training keeps no KV cache"),
    "neftune_noise_alpha": refused(None, "noise on embeddings is not offered; leave it out", float),
    "logging_steps": works(10, "below 1 a share of all steps", float),
    "eval_steps": works(None, kind=float),
    "save_steps": works(500, kind=float),
    "per_device_eval_batch_size": other(8, "the whole set is weighed at once, TRL's loss is a mean over batches"),
    "prediction_loss_only": inert(False, "an evaluation logs the loss and the metrics of training"),
    "include_for_metrics": refused([], "compute_metrics is given predictions and label_ids", list[str]),
    "batch_eval_metrics": works(False),
    "dataloader_drop_last": other(False, "an epoch's last update that is not whole is left out; TRL leaves out the "
                                         "rows that fill no micro-batch"),
    "remove_unused_columns": inert(True, "columns that nothing reads are not kept in any case"),
    "label_names": inert(None, "what is trained is known from the rows", list[str]),
    "train_sampling_strategy": other("random", "random or sequential; the order is whet's, drawn from the seed"),
}  # fmt: skip
"""Fields of transformers that are otherwise than in reinforcement learning."""

MODEL_FIELDS: Table = {
    "model_init_kwargs": other(None, "parameters are float16 where dtype says so, else in what bf16=... says, with "
                                     "fp32 masters in any case; torch_dtype, device_map and attn_implementation ask "
                                     "for nothing; others are refused", dict),
    "trust_remote_code": works(False, "the Python files that lie beside the weights are run"),
    "router_aux_loss_coef": refused(None, "the router's auxiliary loss is not added; leave it out", float,
                                    harmless=(0.0, 0)),
    "pad_to_multiple_of": inert("auto", "nothing is padded", str),
    "pad_token": inert(None, "set on the tokenizer; nothing is padded", str),
    "dataset_num_proc": inert(None, "rows are encoded in this process", int),
    "activation_offloading": inert(False, "gradient_checkpointing saves what it saves"),
}  # fmt: skip
"""Of the model and its rows: those that all three have."""
TEMPLATE_FIELDS: Table = {
    "chat_template_path": other(None, "a .jinja file, or a tokenizer whose tokens the model's has: embeddings are not "
                                      "resized", str),
    "eos_token": works(None, kind=str),
}  # fmt: skip
"""Of the chat template: SFT's and the reward model's."""
NO_DROPOUT = inert(True, "dropout of the model's own is always off; that of an adapter is its lora_dropout")
"""disable_dropout."""


class SupervisedArguments(Arguments):
    """The base of the configurations of supervised training."""

    def _check(self) -> None:
        """Raises ConfigError for values that whet does not support, such as some ways to cut or order rows."""
        super()._check()
        if "truncation_mode" in self.TABLE and self.truncation_mode not in ON_LONG:
            raise lookup_error("truncation_mode", self.truncation_mode, ON_LONG)
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ConfigError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} is not supported: passes are packed, and "
                "nothing is padded, so rows need not be of like length; take 'random' or 'sequential'"
            )
