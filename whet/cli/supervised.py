"""The commands `whet sft`, `whet rm` and `whet dpo`: they build the models and the learner, and run the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from whet.cli.commands import gpu_memory, train, without_read_keys
from whet.cli.resolve_defaults import with_template
from whet.cli.rows import load_train_and_eval
from whet.config import DPORunConfig, RMRunConfig, RoleConfig, SFTRunConfig
from whet.config.run_supervised import SupervisedRunConfig, check_supervised
from whet.data.encoder import Encoder
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder, UnpairedEncoder
from whet.data.prompt_stream import first_row, is_batch
from whet.data.supervised import SFTEncoder
from whet.data.tokenizer import load_tokenizer
from whet.learners.preference import PreferenceLearner, RewardModelLearner
from whet.learners.preference_from_config import make_preference_objective
from whet.learners.sft import SFTLearner
from whet.train.memory_plan import choose_tokens
from whet.train.role_workers import ACTOR
from whet.train.supervised_models import SupervisedModels

__all__ = ["dpo", "rm", "separate_reference", "sft"]

C = TypeVar("C", bound=SupervisedRunConfig)


def sft(config: SFTRunConfig) -> dict[str, Any]:
    """`whet sft`: supervised fine-tuning. With evaluation data it evaluates before and after.

    Args: config: the configuration. actor.model may name a function that creates the model, as in `whet grpo`.
    Returns: the summary, which is also written to summary.json.
    """
    return train(config, _sft)


def rm(config: RMRunConfig) -> dict[str, Any]:
    """`whet rm`: trains a reward model on pairs, for AutoModelForSequenceClassification. Args, Returns: see `sft`."""
    return train(config, _rm)


def dpo(config: DPORunConfig) -> dict[str, Any]:
    """`whet dpo`: trains a policy on preferences. The reference model is the actor's by default. Args: see `sft`."""
    return train(config, _dpo)


def _sft(config: SFTRunConfig) -> tuple[SFTLearner, Any, Any]:
    """Returns the learner of a configuration, and its training and evaluation data."""
    config, rows, tokenizer = _load_data_and_tokenizer(config, SFTEncoder)
    config, options = _model_options(config, tokenizer)
    models = SupervisedModels(actor=config.actor, **options)
    return SFTLearner(models, config.algo, data=without_read_keys(config.data), settings=config), *rows


def _rm(config: RMRunConfig) -> tuple[RewardModelLearner, Any, Any]:
    """Returns the learner of a configuration, and its training and evaluation data."""
    config, rows, tokenizer = _load_data_and_tokenizer(config, ScoredPairEncoder)
    config, options = _model_options(config, tokenizer)
    models = SupervisedModels(reward_model=config.reward_model, **options)
    learner = RewardModelLearner(models, config.algo, data=without_read_keys(config.data), settings=config)
    return learner, *rows


def _dpo(config: DPORunConfig) -> tuple[PreferenceLearner, Any, Any]:
    """Returns the learner of a configuration, and its training and evaluation data."""
    needs = make_preference_objective(config.algo).needs
    encoder = PreferenceEncoder if needs.rows == "pairs" else UnpairedEncoder
    config, rows, tokenizer = _load_data_and_tokenizer(config, encoder)
    reference: RoleConfig | str | None = config.reference
    if config.reference is not None:
        reference = dataclasses.replace(config.reference, model=config.reference.model or config.actor.model)
    elif needs.reference:
        reference = ACTOR
    config, options = _model_options(config, tokenizer)
    models = SupervisedModels(actor=config.actor, reference=reference, **options)
    learner = PreferenceLearner(models, config.algo, data=without_read_keys(config.data), settings=config)
    return learner, *rows


def _load_data_and_tokenizer(config: C, encoder: Callable[..., Encoder[Any]]) -> tuple[C, tuple[Any, Any], Any]:
    """Returns the configuration with its defaults, the training and evaluation data, and the tokenizer.

    The first row of both is encoded, so that a missing column is an error before a model is loaded.
    """
    check_supervised(config)
    rows = load_train_and_eval(config)
    tokenizer = load_tokenizer(
        config.tokenizer or config.trained.model, trust_remote_code=config.trained.trust_remote_code
    )
    config = with_template(config, tokenizer, rows[0])
    encode = encoder(tokenizer, without_read_keys(config.data))
    for data in rows:
        if isinstance(first := first_row(data), Mapping) and not is_batch(first, None):
            encode(first)
    return config, rows, tokenizer


def separate_reference(config: SupervisedRunConfig) -> RoleConfig | None:
    """Returns the reference that takes memory of its own; None = there is none, or it is the base of the trained
    adapter.
    """
    if not isinstance(config, DPORunConfig):
        return None
    if config.reference is not None:
        return dataclasses.replace(config.reference, model=config.reference.model or config.actor.model)
    needs = make_preference_objective(config.algo).needs
    return config.actor if needs.reference and config.actor.lora is None else None


def _model_options(config: C, tokenizer: Any) -> tuple[C, dict[str, Any]]:
    """Returns the configuration with what fits a GPU; the arguments of SupervisedModels that all supervised
    runs share.
    """
    tokens, (memory, num_processes) = None, gpu_memory(config.trainer)
    if memory is not None:
        config, tokens = choose_tokens(config, memory, num_processes, reference=separate_reference(config))
    shared = {"config": config.trainer, "offload_to_cpu": config.offload_to_cpu, "usual_tokens": tokens}
    return config, {"tokenizer": tokenizer, **shared}
