"""GRPOTrainer: TRL's, over whet's GRPOLearner, which has the algorithm.

    GRPOTrainer(model, reward_funcs, args, train_dataset=rows).train()

rl/trainer.py is the base that it shares with RLOOTrainer; trainer/trainer.py is the base of all trainers.
"""

from __future__ import annotations

from whet.trl.config.grpo import GRPOConfig, warn_of_differences
from whet.trl.rl.trainer import RLTrainer

__all__ = ["GRPOTrainer"]


class GRPOTrainer(RLTrainer):
    """TRL's GRPOTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        reward_funcs: functions `fn(prompts, completions, **kwargs) -> list[float | None]`, plain or async, names of
            reward models, or modules; one or a list.
        args: GRPOConfig; None = its defaults, output_dir "{model}-GRPO".
        train_dataset: rows with a column `prompt`, text or messages; a stream needs max_steps.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None = the model's.
        reward_processing_classes: tokenizers of reward models, one for each of reward_funcs.
        callbacks: of transformers.
        peft_config: PEFT's LoraConfig: an adapter is trained in place of all weights.
        quantization_config: BitsAndBytesConfig of 4 bits, for a model given by its name.
        optimizers: (optimizer, schedule) over the model's own fp32 parameters.
        tools: functions, plain or async, with type hints and docstrings of Google's form, which the model may call.
        rollout_func: `fn(prompts, trainer)`, which makes the completions itself: a dict with prompt_ids, completion_ids
            and logprobs, maybe env_mask, and further columns for the reward functions.
        environment_factory: makes an environment for each rollout, whose methods are tools, with `reset` and maybe
            `get_reward`; or a dict of such, of which the column `environment` chooses.
    Raises: ConfigError: what is not there, by name; TRL's rules of batches, with the nearest settings that work.
    """

    METHOD = "GRPO"
    CONFIG = GRPOConfig

    def finish_init(self) -> None:
        """Tells the callbacks that the trainer is there, and warns of TRL's defects that are followed."""
        super().finish_init()
        warn_of_differences(self.args)

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus, as it is now."""
        return self.learner.kl_controller.entropy_coef
