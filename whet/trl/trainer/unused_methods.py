"""Methods of TRL's and transformers' trainers that nothing here calls: a subclass that overrides one is refused."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["NOT_CALLED"]

_OTHERS = """
_build_accelerator_args _clip_grad_norm _defer_fsdp_gradient_reduction _determine_best_metric _evaluate
_finalize_training _finish_current_push _generate_single_turn _get_collator_with_removed_columns _get_dataloader
_get_eval_sampler _get_grad_norm _get_learning_rate _get_num_items_in_batch _get_output_dir _get_tool_suffix_ids
_get_train_sampler _has_mixed_mesh_grads _hp_search_setup _init_training_state _issue_warnings_after_load
_load_best_model _load_callback_state _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state
_load_scaler _log_completion_extra _log_metric _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device
_precompute_ref_logps _prepare_context_parallel_inputs _prepare_dataset _prepare_for_training _prepare_input
_push_from_checkpoint _reject_skip_prepare_without_labels _remove_unused_columns _report_to_hp_search _run_epoch
_save _save_optimizer_and_scheduler _save_rng_state _save_scaler _send_telemetry _set_signature_columns_if_needed
_sync_replicated_trainable_parameters _tokenize_prompts _tool_call_loop _track_num_input_tokens
_tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model autocast_smart_context_manager
call_model_init compute_loss_context_manager compute_ref_log_probs create_accelerator_and_postprocess
evaluation_loop floating_point_ops get_batch_samples get_cp_size get_decay_parameter_names get_gamma_weights
get_high_entropy_mask get_learning_rates get_off_policy_mask get_optimizer_cls_and_kwargs get_optimizer_group
get_sp_size get_test_dataloader get_total_train_batch_size get_tp_size hyperparameter_search init_hf_repo
metrics_format num_examples predict set_initial_training_values store_flos
"""
"""Parts of loops that are other ones here; of TRL 1.16 and transformers 5.23."""
NOT_CALLED: Mapping[str, str] = {
    **dict.fromkeys(_OTHERS.split(), "what can be changed are arguments, callbacks and learners (whet docs extending)"),
    "_inner_training_loop": "give callbacks",
    "_prepare_inputs": "give the rows as they are to be trained on",
    "_save_checkpoint": "give a callback with on_save",
    "create_optimizer": "pass optimizers=(optimizer, scheduler), or set optim",
    "create_optimizer_and_scheduler": "pass optimizers=(optimizer, scheduler), or set optim",
    "create_scheduler": "set lr_scheduler_type and lr_scheduler_kwargs",
    "get_eval_dataloader": "give eval_dataset",
    "get_train_dataloader": "give train_dataset, in the order that it is to have and with shuffling off",
    "prediction_step": "write a callback with on_evaluate",
    "training_step": "give callbacks",
}
"""Method -> what to use instead."""
