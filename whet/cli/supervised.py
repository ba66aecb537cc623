"""What `whet sft` does: from its configuration to models, a learner and a run."""

from __future__ import annotations

from typing import Any

from whet.cli.commands import data, rows_given, train
from whet.config import SFTRunConfig, dump_tree
from whet.config.run_supervised import SupervisedRunConfig, check_supervised
from whet.learners.sft import SFTLearner
from whet.train.supervised_models import SupervisedModels

__all__ = ["sft"]


def sft(config: SFTRunConfig) -> dict[str, Any]:
    """`whet sft`: teaches a model what the assistant says, evaluating before and after where there is evaluation data.

    Args: config: the whole configuration. actor.model may be a function that makes it, as in `whet grpo`.
    Returns: the summary that is written to summary.json.
    """
    return train(config, _sft)


def _sft(config: SFTRunConfig) -> tuple[SFTLearner, Any, Any]:
    """The learner of a configuration, and its training and evaluation data."""
    check_supervised(config)
    rows = data(config)
    models = SupervisedModels(actor=config.actor, **_shared(config))
    return SFTLearner(models, config.algo, data=rows_given(config.data), settings=dump_tree(config)), *rows


def _shared(config: SupervisedRunConfig) -> dict[str, Any]:
    """What every supervised run's models are made with."""
    return {
        "tokenizer": config.tokenizer or config.trained.model,
        "config": config.trainer,
        "offload_to_cpu": config.offload_to_cpu,
    }
