"""TRL's SFTConfig, DPOConfig and RewardConfig field by field; of transformers' fields those that differ from GRPO's."""

from __future__ import annotations

from whet.trl.config.field import Table, inert, old, other, refused, works

__all__ = [
    "DPO_FIELDS",
    "OLD_DPO_FIELDS",
    "OLD_SFT_FIELDS",
    "REWARD_FIELDS",
    "SFT_FIELDS",
    "SUPERVISED_FIELDS",
]

SUPERVISED_FIELDS: Table = {
    "per_device_train_batch_size": works(8, "rows, with accumulation of an update; how many run in one pass is the "
                                            "token budget's to say"),
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
    "include_for_metrics": inert([], "compute_metrics is refused", list[str]),
    "batch_eval_metrics": inert(False, "compute_metrics is refused"),
    "dataloader_drop_last": other(False, "an epoch's last update that is not whole is left out; TRL leaves out the "
                                         "rows that fill no micro-batch"),
    "remove_unused_columns": inert(True, "columns that nothing reads are not kept in any case"),
    "label_names": inert(None, "what is trained is known from the rows", list[str]),
    "train_sampling_strategy": other("random", "random or sequential; the order is whet's, drawn from the seed"),
}  # fmt: skip
"""Fields of transformers that are otherwise than in reinforcement learning."""

_MODEL: Table = {
    "model_init_kwargs": other(None, "dtype is read as fp32 masters with bf16=...; torch_dtype, device_map and "
                                     "attn_implementation ask for nothing; others are refused", dict),
    "trust_remote_code": refused(False, "code of a model's repository is never run"),
    "router_aux_loss_coef": refused(None, "the router's auxiliary loss is not added; leave it out", float,
                                    harmless=(0.0, 0)),
    "pad_to_multiple_of": inert("auto", "nothing is padded", str),
    "pad_token": inert(None, "set on the tokenizer; nothing is padded", str),
    "dataset_num_proc": inert(None, "rows are encoded in this process", int),
    "activation_offloading": inert(False, "gradient_checkpointing saves what it saves"),
}  # fmt: skip
_TEMPLATE: Table = {
    "chat_template_path": other(None, "a .jinja file, or a tokenizer whose tokens the model's has: embeddings are not "
                                      "resized", str),
    "eos_token": works(None, kind=str),
}  # fmt: skip
_NO_DROPOUT = inert(True, "dropout of the model's own is always off; that of an adapter is its lora_dropout")

SFT_FIELDS: Table = {
    **_MODEL,
    **_TEMPLATE,
    "learning_rate": works(2e-5),
    "dataset_text_field": works("text"),
    "dataset_kwargs": other(None, "skip_prepare_dataset, with rows of input_ids; others are refused", dict),
    "max_length": works(1024, "None = no limit", int),
    "truncation_mode": works("keep_start", "or keep_end; rows with nothing trained left are dropped and counted"),
    "shuffle_dataset": other(False, "an order drawn once, from whet's own generator"),
    "packing": other(False, "passes are packed in any case, and no row sees another: the option decides how many rows "
                            "make up a step, which are those of so many packs of max_length tokens"),
    "packing_strategy": other("bfd", "bfd and bfd_split make TRL's packs; wrapped is refused: rows see each other"),
    "padding_free": inert(False, "nothing is padded in any case"),
    "eval_packing": inert(None, "an evaluation is weighed over all its tokens, packed or not", bool),
    "completion_only_loss": works(None, "None = where rows have prompt and completion", bool),
    "assistant_only_loss": other(False, "turns are found by rendering, in the model's own template; marks "
                                        "({% generation %}) within them have the last word"),
    "loss_type": works("nll", "nll, dft, or a function of whet's"),
}  # fmt: skip
"""Field -> what it is here."""

DPO_FIELDS: Table = {
    **_MODEL,
    "disable_dropout": _NO_DROPOUT,
    "max_length": works(1024, "None = no limit", int),
    "truncation_mode": works("keep_start", "or keep_end; pairs with nothing trained left are dropped and counted"),
    "padding_free": inert(False, "nothing is padded in any case"),
    "precompute_ref_log_probs": works(False),
    "precompute_ref_batch_size": inert(None, "passes go by the token budget", int),
    "loss_type": works(["sigmoid"], "and whet's others that take pairs (docs/preference.md)", list[str]),
    "loss_weights": works(None, kind=list[float]),
    "ld_alpha": works(None, kind=float),
    "f_divergence_type": works("reverse_kl"),
    "f_alpha_divergence_coef": works(0.5),
    "label_smoothing": other(0.0, "of sigmoid too, which is cDPO: TRL's sigmoid takes no notice of it"),
    "beta": works(0.1),
    "use_weighting": works(False),
    "discopop_tau": works(0.05),
    "sync_ref_model": works(False),
    "ref_model_mixup_alpha": works(0.6),
    "ref_model_sync_steps": works(512),
}  # fmt: skip
"""Field -> what it is here."""

REWARD_FIELDS: Table = {
    **{name: row for name, row in _MODEL.items() if name != "router_aux_loss_coef"},
    **_TEMPLATE,
    "learning_rate": works(1e-4),
    "disable_dropout": _NO_DROPOUT,
    "max_length": works(1024, "pairs that are longer are left out, as there", int),
    "center_rewards_coefficient": works(None, kind=float),
}
"""Field -> what it is here."""

_NO_PROMPT_LIMIT = "not read: max_length is the limit of prompt and answer, as in later releases"
OLD_SFT_FIELDS: Table = {
    "max_seq_length": old("max_length", int),
}
"""Field of an earlier TRL -> how it is read."""
OLD_DPO_FIELDS: Table = {
    "max_prompt_length": old(_NO_PROMPT_LIMIT, int),
    "max_completion_length": old(_NO_PROMPT_LIMIT, int),
}
"""Field of an earlier TRL -> how it is read."""
