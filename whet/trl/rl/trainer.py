"""RLTrainer: the base of GRPOTrainer and RLOOTrainer: rewards, rollouts, logged completions.

It makes the cluster and the learner from the arguments of TRL's constructors; `args.to_whet()` is the algorithm. Read
`__init__` first, then learner.py, then trainer/task.py for the callbacks.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from whet.cluster import RLCluster
from whet.config import ClusterConfig, DataConfig, Mode, RoleConfig
from whet.data.prompts import PromptEncoder
from whet.errors import ConfigError
from whet.models.modes import max_positions
from whet.trl.agents.agents import Agents
from whet.trl.config.translate import rl_training_config, rollout_config, template_options
from whet.trl.rl.completions import Completions
from whet.trl.rl.learner import TRLLearner
from whet.trl.rl.loaders import eval_loader, train_loader
from whet.trl.rl.reward_functions import RewardLog, make_reward_functions
from whet.trl.rl.rows import longest_prompt, prepare_rows
from whet.trl.trainer import metrics as metric_names
from whet.trl.trainer.data import check_dataset, check_evaluation, load_eval_sets
from whet.trl.trainer.messages import VOCABULARY
from whet.trl.trainer.model import module_dtype, prepare_model, unwrap_peft
from whet.trl.trainer.not_provided import NOT_CALLED
from whet.trl.trainer.task import RLCallbackTask
from whet.trl.trainer.trainer import Trainer
from whet.types import TokenBatch
from whet.util.garbage import pause_collector

__all__ = ["RLTrainer"]

log = logging.getLogger("whet")

_LOSS = "write a loss for whet's GRPOLearner (whet docs extending)"
_GENERATE = "give rollout_func, or replace model.generate on the instance"


class RLTrainer(Trainer):
    """The base of the trainers on rewards; GRPOTrainer describes the arguments."""

    NOT_CALLED: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        "_calculate_rewards": "give reward_funcs",
        "_compute_loss": _LOSS,
        "_generate": _GENERATE,
        "_generate_and_score_completions": f"{_GENERATE}, and give reward_funcs",
        "_generate_single_turn": _GENERATE,
        "_tool_call_loop": _GENERATE,
        "_get_per_token_logps_and_entropies": _LOSS,
        "compute_loss": f"{_LOSS}, or choose loss_type",
    }

    aux_loss_enabled = False

    @pause_collector()
    @VOCABULARY.translating()
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
        super().__init__(model, args, processing_class, callbacks)
        model = unwrap_peft(model)
        args = self.args
        self.agents = Agents(tools, environment_factory, rollout_func, self.processing_class, args)
        if args.world_size > 1 and self.agents.has_tools:
            raise ConfigError(
                f"WORLD_SIZE is {args.world_size}, and tools and environments run in one process in this release; "
                "start one process, or give rollout_func, which each process calls with its own prompts"
            )
        self.rollout_func, self.tools = rollout_func, self.agents.functions
        self.completions = Completions(args)
        if args.sync_ref_model and (peft_config is not None or model is not self._original_model):
            raise ConfigError(
                "You passed `sync_ref_model=True` while using a PEFT model: the reference is the base under the "
                "adapter, and there is no second model to synchronize; set `sync_ref_model=False`, or train all weights"
            )
        self.reward_log = RewardLog(lambda: self.state, lambda: self.models.ranks)
        self._metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        """Values that a script appends; the next log or evaluation has their means."""
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._read_data()
        functions = make_reward_functions(
            reward_funcs, reward_processing_classes, self.processing_class, args, self.agents.rewards
        )
        prepared = prepare_model(model, args, peft_config, quantization_config)
        self.cluster = self.models = self._cluster(prepared, optimizers)
        self.learner = self._learner(functions)
        self.reward_funcs, self._functions = functions, list(functions)
        user_functions = functions[: len(functions) - len(self.agents.rewards)]
        self.reward_processing_classes = [getattr(fn, "tokenizer", None) for fn in user_functions]
        self.reward_func_names = list(self.learner.reward_manager.fns)
        self.get_train_dataloader = partial(train_loader, self)  # not a method: a subclass's method is refused
        self.get_eval_dataloader = partial(eval_loader, self)
        self.cluster.actor_trainer.set_metric_reductions({"policy_loss": "weighted"})
        self.finish_init()

    # ---- data, cluster and learner ----------------------------------------------------------------------------------

    def _train_rows(self, data: Any) -> Any:
        """Returns the rows of train_dataset; without it, empty prompts for the environment."""
        if data is not None:
            return self._prepare_rows(check_dataset(data, "train_dataset"))
        if self.agents.environments is None:
            raise ConfigError(
                "`train_dataset` is required unless an `environment_factory` makes the prompts; give one of them"
            )
        if isinstance(self.agents.environments.factory, Mapping):
            raise ConfigError(
                "a dict `environment_factory` requires a `train_dataset` whose column `environment` chooses one for "
                "each row; give it, or a single environment factory"
            )
        if self.args.max_steps <= 0:
            raise ConfigError(
                "without `train_dataset` the environment makes the prompts, and the run has no length: set max_steps"
            )
        return prepare_rows([{}] * self.args.batches.prompts, without_prompt=True)

    def _prepare_rows(self, data: Any) -> Any:
        """Returns the prepared rows of a data set; with an environment, rows may lack a prompt."""
        return prepare_rows(
            data, prompt_only=self.args.remove_unused_columns, without_prompt=self.agents.environments is not None
        )

    def _learner(self, functions: Sequence[Any]) -> TRLLearner:
        """Makes the learner."""
        args = self.args
        algo = args.to_whet()
        if algo.reward_weights is not None:  # rewards of environments have weight 1
            weights = (*algo.reward_weights, *[1.0] * len(self.agents.rewards))
            algo = dataclasses.replace(algo, reward_weights=weights)
        learner = TRLLearner(
            self.cluster,
            algo,
            list(functions),
            data=DataConfig(
                batch_size=args.batches.prompts,
                shuffle=bool(args.shuffle_dataset) and isinstance(self._rows, list),
                prompt_column="prompt",
                on_answered="continue",
            ),
        )
        self.agents.attach(self.cluster, template_options(args))
        learner.batches, learner.agents, learner.trainer = args.batches, self.agents, self
        learner.make_task = lambda learner: RLCallbackTask(learner, self)
        self._connect_rewards(learner)
        return learner

    def _connect_rewards(self, learner: TRLLearner) -> None:
        """Sets the reward manager's log and agents."""
        manager: Any = learner.reward_manager
        manager.log, manager.agents = self.reward_log, self.agents

    def _read_data(self) -> None:
        """Reads the data sets and counts the steps of the run."""
        if self.has_changed("train_dataset"):
            self._rows = self._train_rows(self.train_dataset)
            if not isinstance(self._rows, list):
                self._check_stream()
        self.read_eval_data()
        check_evaluation(self.args, self.eval_rows)
        self._count_steps()

    def _check_stream(self) -> None:
        """Checks the arguments that a stream restricts, and changes them as TRL does."""
        args = self.args
        if args.accelerator_config.dispatch_batches:
            raise ConfigError(
                "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`; "
                "set it to `False`, or leave it out"
            )
        args.accelerator_config.dispatch_batches = False
        if args.dataloader_num_workers:
            log.warning(
                "Iterable datasets require `dataloader_num_workers=0`, which is taken in place of %d: one process "
                "reads the rows",
                args.dataloader_num_workers,
            )
            args.dataloader_num_workers = 0

    def read_changes(self) -> None:
        """Reads the data sets and the reward functions again if they were replaced."""
        self._read_data()
        learner, functions = self.learner, list(self.reward_funcs)
        learner.data = dataclasses.replace(
            learner.data, shuffle=bool(self.args.shuffle_dataset) and isinstance(self._rows, list)
        )
        if functions != self._functions:
            environment_rewards = self.agents.rewards
            user_functions = [fn for fn in functions if fn not in environment_rewards]
            self.reward_funcs = make_reward_functions(
                user_functions, None, self.processing_class, self.args, environment_rewards
            )
            self._functions = list(self.reward_funcs)
            learner.set_reward_fns(self.reward_funcs)
            self._connect_rewards(learner)
            self.reward_func_names = list(learner.reward_manager.fns)

    def _count_steps(self) -> None:
        """Computes the number of rollouts and optimizer steps of the run."""
        args, batches = self.args, self.args.batches
        if isinstance(self._rows, list):
            rollouts = len(self._rows) // batches.prompts
            if not rollouts:
                raise ConfigError(
                    f"train_dataset has {len(self._rows)} rows, and a rollout takes {batches.prompts} prompts "
                    f"({batches}): TRL would train for 0 steps; lower per_device_train_batch_size or "
                    "gradient_accumulation_steps, raise num_generations, or give more rows"
                )
            self.updates_per_epoch = rollouts * batches.updates
            self._steps = math.ceil(args.num_train_epochs * rollouts)
        elif args.max_steps <= 0:
            raise ConfigError("train_dataset has no length: set max_steps, the optimizer steps of the run")
        else:
            self._steps = 0
        if args.max_steps > 0:
            self._steps = -(-args.max_steps // batches.updates)
        self.max_steps = self._steps * batches.updates

    def _cluster(self, model: RoleConfig | nn.Module, optimizers: tuple[Any, Any]) -> RLCluster:
        args = self.args
        optim = self.optim(optimizers, None)
        return RLCluster(
            actor=model,
            reference="actor" if args.beta else None,
            tokenizer=self.processing_class,
            cluster_config=ClusterConfig(
                device="cpu" if args.use_cpu else None,
                rollout_engine="vllm" if args.use_vllm else "embedded",
                rollout_config=rollout_config(args, self._longest_prompt(model)),
                training_config=rl_training_config(args, self._steps or None, optim, self.resumable_root),
            ),
            module_dtype=module_dtype(args, model, optimizers),
        )

    def _longest_prompt(self, model: RoleConfig | nn.Module) -> int:
        """Returns the tokens of the longest prompt: max_prompt_length, else measured on the data sets."""
        args = self.args
        if args.max_prompt_length:
            return args.max_prompt_length
        encoder = PromptEncoder(
            self.processing_class,
            on_answered="continue",
            prompt_column="prompt",
            chat_template_kwargs=template_options(args),
            tools=self.agents.schemas or None,
        )
        positions = max_positions(model) if isinstance(model, nn.Module) else None
        if self.agents.environments is not None:  # their first observations are not known yet
            return longest_prompt(encoder, [None], positions, args.max_completion_length)
        sets = [self._rows, *self.eval_rows.values()]
        return longest_prompt(encoder, sets, positions, args.max_completion_length)

    def train_rows(self) -> Any:
        """Returns the rows to train on."""
        return self._rows

    # ---- attributes of TRL's trainers -------------------------------------------------------------------------------

    @property
    def _logs(self) -> dict[str, Any]:
        """The last rollout: prompts, completions, each function's rewards, advantages, extra columns."""
        return self.completions.logs()

    @property
    def environments(self) -> list[Any]:
        """The environments of the last rollout, one for each completion; empty without environment_factory."""
        return [] if self.agents.environments is None else self.agents.environments.in_use

    @property
    def reward_weights(self) -> torch.Tensor:
        """The weight of each reward function, 1 for environments' rewards. The next rollout uses new weights."""
        weights = self.learner.reward_manager.weights
        return torch.tensor([weights.get(name, 1.0) for name in self.reward_func_names])

    @reward_weights.setter
    def reward_weights(self, values: Iterable[float]) -> None:
        weights = [float(value) for value in values]
        if len(weights) != len(self.reward_func_names):
            raise ConfigError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions "
                f"({len(self.reward_func_names)})"
            )
        self.learner.reward_manager.weights = dict(zip(self.reward_func_names, weights, strict=True))

    # ---- methods of the base ----------------------------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        """The optimizer steps of a rollout."""
        return self.args.batches.updates

    @property
    def rows_per_update(self) -> int:
        """The completions of an optimizer step."""
        return self.args.batches.rows

    def eval_sets(self, data: Any) -> dict[str, list[dict[str, Any]]]:
        """Evaluation rows by name."""
        return load_eval_sets(data, lambda rows, _: self._prepare_rows(rows))

    def measure(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Samples completions of an evaluation set and scores them. Returns: the metrics under TRL's names."""
        encode = self.learner.encoder(Mode.EVAL)
        prompts = [prompt for i, row in enumerate(rows) if (prompt := encode(row, i)) is not None]
        row, batch = self.learner.measure(prompts, self.state.global_step)
        metrics = self.trl_metrics(row, batch) | self.reward_log.take()[1]
        metrics |= {name: sum(values) / len(values) for name, values in self._metrics["eval"].items()}
        self._metrics["eval"].clear()
        return metrics | self.agents.take_metrics(len(prompts) * self.learner.num_generations_of(Mode.EVAL))

    def trl_metrics(self, row: Mapping[str, Any], batch: TokenBatch) -> dict[str, float]:
        """Returns a step's metrics under TRL's names. Args: row: whet's metrics. batch: the scored completions."""
        return metric_names.trl_metrics(row, compat=self.args.compat)

    def resume_from(self, folder: str | None) -> None:
        """Sets the folder that the next run resumes from; None = it starts anew."""
        steps = self._steps or None
        self.learner.config = dataclasses.replace(self.cluster.training_config, resume=folder, max_steps=steps)

    def record_step(self, row: Mapping[str, Any], step: Any) -> None:
        """Records the metrics of a rollout and of the reward functions, and the completions."""
        extra, logged = self.reward_log.take()
        metrics = self.trl_metrics(row, step.batch) | logged | self.agents.take_metrics(step.batch.num_sequences)
        self.window.add({**metrics, "num_tokens": float(self.state.num_input_tokens_seen)})
        self.completions.add(step, extra)

    def log_window(self, totals: dict[str, float] | None = None) -> None:
        """Logs the means since the last log, and writes the completions of the last rollout."""
        for name, values in self._metrics["train"].items():
            for value in values:
                self.window.add({name: value})
        self._metrics["train"].clear()
        super().log_window(totals)
        self.completions.write(self.state.global_step)

    def _load_best(self, folder: Any) -> None:
        """Loads the best weights into the model and the engine."""
        super()._load_best(folder)
        self.cluster.sync_weights()
