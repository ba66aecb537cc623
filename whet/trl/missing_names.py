"""Names of current and earlier TRL releases that whet.trl lacks, and the alternatives."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MISSING_NAMES"]

_WHET = "use whet's own command or classes"
_TEMPLATES = "whet finds a conversation's trained tokens by rendering the template, which needs no marks; leave it out"
_LOSS = "use whet.trl's DPOTrainer with loss_type"
_DISTILLATION = "use whet grpo with algo.policy_loss_fn=gkd, which distils a teacher (docs/algorithms.md)"
_ONLINE = "there is no online DPO: use GRPOTrainer, or DPOTrainer on pairs that you sampled"
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
    "GKDConfig": _DISTILLATION,
    "GKDTrainer": _DISTILLATION,
    "IterativeSFTTrainer": "use SFTTrainer on the rows of each round",
    "NashMDConfig": _ONLINE,
    "NashMDTrainer": _ONLINE,
    "OnlineDPOConfig": _ONLINE,
    "OnlineDPOTrainer": _ONLINE,
    "ORPOConfig": f"{_LOSS}='orpo'",
    "ORPOTrainer": f"{_LOSS}='orpo'",
    "PPOConfig": f"{_WHET}: whet ppo, or whet's PPOLearner",
    "PPOTrainer": f"{_WHET}: whet ppo, or whet's PPOLearner",
    "PRMConfig": "whet has reward models of whole completions: RewardTrainer",
    "PRMTrainer": "whet has reward models of whole completions: RewardTrainer",
    "WeaveCallback": "for tables of completions set log_completions=True, or use LogCompletionsCallback",
    "XPOConfig": _ONLINE,
    "XPOTrainer": _ONLINE,
    "add_response_schema": "set tokenizer.response_template if whet does not find the calls by the chat template",
    "get_kbit_device_map": "leave device_map out: whet puts 4-bit weights on its own device",
    "get_training_chat_template": _TEMPLATES,
    "prepare_multimodal_messages": "whet.trl does not train on images",
    "supports_tool_calling": "give tools: an error names a template that does not support them",
}
"""Name -> the alternative."""
