"""Names of current and earlier TRL releases that whet.trl lacks, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MISSING_NAMES"]

_WHET = "use whet's own command or classes"
_TEMPLATES = "whet finds a conversation's trained tokens by rendering the template, which needs no marks; leave it out"
_LOSS = "use whet.trl's DPOTrainer with loss_type"
MISSING_NAMES: Mapping[str, str] = {
    "AutoModelForCausalLMWithValueHead": "PPO's critic is a separate model: whet ppo, or whet's PPOLearner",
    "BEMACallback": "averages of weights are not supported",
    "BCOConfig": f"{_LOSS}='bco_pair'",
    "BCOTrainer": f"{_LOSS}='bco_pair'",
    "CPOConfig": f"{_LOSS}='cpo' or 'simpo'",
    "CPOTrainer": f"{_LOSS}='cpo' or 'simpo'",
    "DataCollatorForCompletionOnlyLM": "give rows of prompt and completion, or assistant_only_loss=True",
    "DistillationConfig": "distillation here is whet grpo's and whet sft's (docs/algorithms.md)",
    "DistillationTrainer": "distillation here is whet grpo's and whet sft's (docs/algorithms.md)",
    "ORPOConfig": f"{_LOSS}='orpo'",
    "ORPOTrainer": f"{_LOSS}='orpo'",
    "PPOConfig": f"{_WHET}: whet ppo, or whet's PPOLearner",
    "PPOTrainer": f"{_WHET}: whet ppo, or whet's PPOLearner",
    "WeaveCallback": "for tables of completions set log_completions=True, or use LogCompletionsCallback",
    "add_response_schema": "set tokenizer.response_template if whet does not find the calls by the chat template",
    "get_training_chat_template": _TEMPLATES,
    "prepare_multimodal_messages": "whet.trl does not train on images",
    "supports_tool_calling": "give tools: an error names a template that does not support them",
}
"""Name -> the alternative."""
