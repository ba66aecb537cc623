"""Names of TRL, of this release or an earlier one, that whet.trl does not have, each with the alternative."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MISSING_NAMES"]

_WHET = "whet trains that by its own command or classes"
_TEMPLATES = (
    "whet finds the trained tokens of a conversation with the template itself, which needs no marks; leave it out"
)
_LOSS = "take loss_type of whet.trl's DPOTrainer"
MISSING_NAMES: Mapping[str, str] = {
    "AutoModelForCausalLMWithValueHead": "PPO's critic is a model of its own: whet ppo, or whet's PPOLearner",
    "BEMACallback": "averages of weights are not offered",
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
    "WeaveCallback": "for tables of completions take log_completions=True, or LogCompletionsCallback",
    "add_response_schema": "set tokenizer.response_template where no call is found by asking the chat template",
    "get_training_chat_template": _TEMPLATES,
    "prepare_multimodal_messages": "rows with images are not trained here",
    "supports_tool_calling": "give tools: a template that has no calls is refused by name",
}
"""Name -> what to do instead."""
