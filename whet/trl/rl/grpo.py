"""GRPOTrainer: TRL's interface over whet's GRPOLearner, which implements the algorithm.

    GRPOTrainer(model, reward_funcs, args, train_dataset=rows).train()

rl/trainer.py is the base of GRPOTrainer and RLOOTrainer; trainer/trainer.py is the base of all trainers.
"""

from __future__ import annotations

from whet.trl.config.grpo import GRPOConfig, warn_of_differences
from whet.trl.rl.trainer import RLTrainer

__all__ = ["GRPOTrainer"]


class GRPOTrainer(RLTrainer):
    """Trains by GRPO, with the interface of TRL's GRPOTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        reward_funcs: one or a list of: functions `fn(prompts, completions, **kwargs) -> list[float | None]`, plain or
            async; names of reward models; modules.
        args: GRPOConfig; None = its defaults, output_dir "{model}-GRPO".
        train_dataset: rows with a column `prompt`, a text or messages. A stream needs max_steps.
        eval_dataset: like train_dataset, or a dict of several data sets by name.
        processing_class: the tokenizer; None = the tokenizer of the model.
        reward_processing_classes: the reward models' tokenizers, one for each of reward_funcs.
        callbacks: callbacks of transformers.
        peft_config: PEFT's LoraConfig, to train an adapter instead of all weights.
        quantization_config: 4-bit BitsAndBytesConfig, for a model given by name.
        optimizers: (optimizer, scheduler) over the model's own fp32 parameters.
        tools: functions that the model may call, plain or async, with type hints and Google-style docstrings.
        rollout_func: `fn(prompts, trainer)` generates the completions. It returns a dict with prompt_ids,
            completion_ids and logprobs, optionally env_mask and further columns for the reward functions.
        environment_factory: makes an environment for each completion. Its methods are tools; it has `reset` and
            optionally `get_reward`. Or a dict of factories, from which the column `environment` chooses.
    Raises: ConfigError: an unsupported argument; a batch that breaks TRL's rules, with the nearest settings that work.
    """

    METHOD = "GRPO"
    CONFIG = GRPOConfig

    def finish_init(self) -> None:
        """Calls on_init_end, and warns where the results differ from TRL's."""
        super().finish_init()
        warn_of_differences(self.args)

    @property
    def entropy_coef(self) -> float:
        """The current coefficient of the entropy bonus."""
        return self.learner.kl_controller.entropy_coef
