"""GRPOTrainer: TRL's, over GRPOLearner. It chooses configurations and hands data on; the algorithm is the learner's.

    GRPOTrainer(model, reward_funcs, args, train_dataset=rows).train()

Reading order: `__init__`, then learner.py for what of the learner differs, task.py for when callbacks are told.
"""

from __future__ import annotations

import dataclasses
import math
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from whet.cluster import RLCluster
from whet.config import ClusterConfig, DataConfig, Mode, Role, RoleConfig
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.models.lora import with_adapter
from whet.models.modes import max_positions
from whet.models.recompute import checkpoint_activations
from whet.trl import optimizers as factories
from whet.trl.adapters import inner_model, lora_of, quantization_of
from whet.trl.grpo_config import GRPOConfig
from whet.trl.learner import TRLLearner
from whet.trl.names import trl_metrics
from whet.trl.rewarding import reward_functions
from whet.trl.rows import eval_sets, longest_prompt, rows_of
from whet.trl.task import TRLTask
from whet.trl.trainer import Trainer
from whet.trl.translate import algorithm, loop, optimizer, recompute, role, rollout, warn

__all__ = ["GRPOTrainer"]

_LATER = {
    "environment_factory": "episodes with environments are not there yet; score completions in a reward function",
    "rollout_func": "rollouts of a user's own are whet's RLLearner.rollout (docs/extending.md); subclass GRPOLearner",
    "tools": "tools are not there yet; leave them out",
}
"""Arguments that are refused, and what to do instead."""


class GRPOTrainer(Trainer):
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
    Raises: ConfigError: what is not there, by name; TRL's rules of batches, with the nearest settings that work.
    """

    METHOD = "GRPO"

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        given = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name} is not taken: {_LATER[name]}")
        model = inner_model(model)
        name = model if isinstance(model, str) else model.name_or_path or type(model).__name__  # pyright: ignore
        args = GRPOConfig(f"{str(name).rstrip('/').rpartition('/')[2]}-GRPO") if args is None else args
        if not isinstance(args, GRPOConfig):
            raise ConfigError(f"args is a {type(args).__module__}.{type(args).__name__}; take whet.trl's GRPOConfig")
        tokenizer = load_tokenizer(_text_only(processing_class, name))
        super().__init__(args, tokenizer, callbacks)
        warn(args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._rows = None if train_dataset is None else rows_of(train_dataset, prompt_only=args.remove_unused_columns)
        self._eval = eval_sets(eval_dataset, prompt_only=args.remove_unused_columns)
        self._plan()
        functions = reward_functions(reward_funcs, reward_processing_classes, tokenizer, args)
        self.cluster = self._cluster(_adapted(model, args, peft_config, quantization_config), optimizers)
        self.learner = TRLLearner(
            self.cluster,
            algorithm(args),
            functions,
            data=DataConfig(
                on_answered="continue",
                batch_size=args.batches.prompts,
                shuffle=bool(args.shuffle_dataset) and isinstance(self._rows, list),
                prompt_column="prompt",
            ),
        )
        self.learner.batches, self.learner.make_task = args.batches, lambda learner: TRLTask(learner, self)
        manager: Any = self.learner.reward_manager
        manager.log = self.reward_log
        self.reward_funcs, self.reward_func_names = functions, list(manager.fns)
        self.cluster.actor_trainer.with_rl_metrics_to_log({"policy_loss": "weighted"})
        self.ready()

    # ---- making --------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """How many rollouts and optimizer steps the run has."""
        args, made = self.args, self.args.batches
        if isinstance(self._rows, list):
            each = len(self._rows) // made.prompts
            if not each:
                raise ConfigError(
                    f"train_dataset has {len(self._rows)} rows, and a rollout takes {made.prompts} prompts "
                    f"({made}): TRL would train for 0 steps; lower per_device_train_batch_size or "
                    "gradient_accumulation_steps, raise num_generations, or give more rows"
                )
            self.updates_per_epoch = each * made.updates
            self._steps = math.ceil(args.num_train_epochs * each)
        elif self._rows is not None and args.max_steps <= 0:
            raise ConfigError("train_dataset has no length: set max_steps, the optimizer steps of the run")
        else:
            self._steps = 0
        if args.max_steps > 0:
            self._steps = -(-args.max_steps // made.updates)
        self.max_steps = self._steps * made.updates

    def _cluster(self, model: RoleConfig | nn.Module, optimizers: tuple[Any, Any]) -> RLCluster:
        args = self.args
        own, self.scheduler = optimizers
        if own is None and self.scheduler is not None:
            raise ConfigError("optimizers has a schedule and no optimizer; give both, or set lr_scheduler_type")
        optim = optimizer(args, self.max_steps or None)
        if own is not None:
            optim = factories.given(own, self.scheduler, args.max_grad_norm)
        if isinstance(model, nn.Module) and args.gradient_checkpointing:
            checkpoint_activations(model, recompute(args))  # pyright: ignore[reportArgumentType]
        root = None if args.save_strategy == "no" or args.save_only_model else f"{args.output_dir}/.whet"
        on_cpu = args.use_cpu and torch.cuda.is_available()
        return RLCluster(
            actor=model,
            reference="actor" if args.beta else None,
            tokenizer=self.processing_class,
            cluster_config=ClusterConfig(
                role_to_mesh={r: SimpleNamespace(device_type="cpu") for r in Role} if on_cpu else None,
                rollout_engine="vllm" if args.use_vllm else "embedded",
                rollout_config=rollout(args, self._longest(model)),
                training_config=loop(args, self._steps or None, optim, root),
            ),
        )

    def _longest(self, model: RoleConfig | nn.Module) -> int:
        """Tokens of the longest prompt of all data."""
        args = self.args
        if args.max_prompt_length:
            return args.max_prompt_length
        encoder = PromptEncoder(
            self.processing_class,
            prompt_column="prompt",
            on_answered="continue",
            chat_template_kwargs={"enable_thinking": True, **(args.chat_template_kwargs or {})},
        )
        positions = max_positions(model) if isinstance(model, nn.Module) else None
        sets = [rows for rows in (self._rows, *self._eval.values()) if rows is not None]
        return longest_prompt(encoder, sets, positions, args.max_completion_length)

    def train_rows(self) -> Any:
        """The rows to train on. Raises ConfigError: there are none."""
        if self._rows is None:
            raise ConfigError("train() needs train_dataset; give it to the trainer")
        return self._rows

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Samples and scores the evaluation data; the result is logged, and on_evaluate told, for each set.

        Args: eval_dataset: in place of the trainer's; the name of one of several, or data. ignore_keys: not used.
            metric_key_prefix: of the names; the name of a set follows it.
        Returns: the metrics of all sets.
        """
        sets = self._eval
        if isinstance(eval_dataset, str):
            if eval_dataset not in sets:
                raise ConfigError(f"there is no evaluation set {eval_dataset!r}; there are {', '.join(sets) or 'none'}")
            sets = {eval_dataset: sets[eval_dataset]}
        elif eval_dataset is not None:
            sets = eval_sets(eval_dataset, prompt_only=self.args.remove_unused_columns)
        if not sets:
            raise ConfigError("evaluation needs eval_dataset; give it to the trainer, or to evaluate()")
        metrics: dict[str, float] = {}
        for name, rows in sets.items():
            metrics |= self._evaluated(rows, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        return metrics

    def _evaluated(self, rows: list[dict[str, Any]], prefix: str) -> dict[str, float]:
        encode = self.cluster.encoder(Mode.EVAL, prompt_column="prompt")
        prompts = [prompt for place, row in enumerate(rows) if (prompt := encode(row, place)) is not None]
        started = time.monotonic()
        made = self.learner.measure(prompts, self.state.global_step)
        seconds = time.monotonic() - started
        own = self.reward_log.take()[1]
        self.learner.cluster.take_metrics(self.state.global_step, Mode.EVAL)
        found = {**trl_metrics(made, compat=self.args.compat), **own}
        found |= {
            "runtime": round(seconds, 4),
            "samples_per_second": round(len(rows) / max(seconds, 1e-9), 3),
            "steps_per_second": round(1 / max(seconds, 1e-9), 3),
            "num_tokens": float(self.state.num_input_tokens_seen),
        }
        metrics = {f"{prefix}_{name}": value for name, value in found.items()}
        self.log(dict(metrics))
        self.tell("on_evaluate", metrics=metrics)
        return metrics


def _adapted(model: str | nn.Module, args: Any, peft_config: Any, quantization_config: Any) -> RoleConfig | nn.Module:
    """The model as the cluster takes it, with its adapter."""
    lora = None if peft_config is None else lora_of(peft_config, model)
    if isinstance(model, str):
        bits = None if quantization_config is None else quantization_of(quantization_config)
        return dataclasses.replace(role(args, model), lora=lora, quantization=bits)
    if quantization_config is not None:
        raise ConfigError("quantization_config is for a model given by its name; this one is loaded already")
    if lora is not None:
        with_adapter(model, lora, seed=args.seed)  # pyright: ignore[reportArgumentType]
    return model


def _text_only(processing_class: Any, name: Any) -> Any:
    """What makes the tokenizer: a processor's own, the one given, or the model's name."""
    inner = getattr(processing_class, "tokenizer", None)
    return name if processing_class is None else processing_class if inner is None else inner
