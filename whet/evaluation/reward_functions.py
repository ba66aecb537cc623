"""The reward functions of an evaluation, reward model included, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet._version import __version__
from whet.config import RoleConfig
from whet.config.evaluate import EvalRunConfig
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.models.load import load_model
from whet.models.precision import compute_dtype
from whet.rewards.call import function_name
from whet.rewards.manager import RewardManager
from whet.rewards.model import RewardModel
from whet.rewards.resolve import with_reward_model
from whet.rollout.sampler import Sampler
from whet.run.provenance import function_source, weights_digest
from whet.storage.model_paths import model_folder
from whet.train.worker import ModelWorker

__all__ = ["hash_reward_functions", "make_reward_manager"]


def make_reward_manager(
    config: EvalRunConfig, sampler: Sampler, reward_fns: Any = None, *, has_own: bool = False
) -> RewardManager:
    """Returns the reward functions of an evaluation.

    Args:
        config: its reward functions, weights, reward model and limits.
        sampler: of the model that is evaluated.
        reward_fns: one function or a list, in place of config.reward; None = config.reward.
        has_own: the episodes bring a reward, so there may be no functions.
    Raises: ConfigError: as RewardManager does, or the reward model can't be loaded.
    """
    fns = list(config.reward_names) if reward_fns is None else reward_fns
    weights = config.reward_weights if reward_fns is None else None
    if config.reward_model is not None:
        fns = with_reward_model(fns, _reward_model(config, config.reward_model, sampler))
    return RewardManager(
        fns,
        weights,
        on_error=config.on_reward_error,
        timeout_s=config.reward_timeout_s,
        workers=config.reward_workers,
        groups_have_rewards=has_own,
    )


def _reward_model(config: EvalRunConfig, section: RoleConfig, sampler: Sampler) -> RewardModel:
    """Returns the reward model of a section, on the device of the model that is evaluated."""
    if section.model is None:
        raise ConfigError("reward_model has no model; write reward_model.model=<hub name or folder>")
    device = sampler.loaded.module.device
    loaded = load_model(
        section.model,
        device=device,  # pyright: ignore[reportArgumentType]
        role="reward",
        attention=section.attention,
        trust_remote_code=section.trust_remote_code,
    )
    longest = None if sampler.longest is None else -(-sampler.longest // 128) * 128
    worker = ModelWorker(
        loaded,
        dtype=compute_dtype(section.dtype, loaded),
        max_tokens=max(16384 if loaded.module.device.type != "cpu" else 2048, longest or 0),
        config=section,
    )
    folder = Path(model_folder(section.model))
    has_tokenizer = not folder.is_dir() or any(
        (folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")
    )
    return RewardModel(
        worker,
        name=loaded.name.rstrip("/").rpartition("/")[2],
        policy_tokenizer=sampler.tokenizer,
        tokenizer=load_tokenizer(section.model, trust_remote_code=section.trust_remote_code) if has_tokenizer else None,
        apply_chat_template=config.data.apply_chat_template,  # pyright: ignore[reportArgumentType]  (auto is resolved)
        system_prompt=config.data.system_prompt,
    )


def hash_reward_functions(manager: RewardManager, columns: Sequence[int]) -> str:
    """Returns a hash of the reward functions, their source files, and the columns that they read.

    Args: columns: the checksums of the data's columns.
    """
    parts: list[Any] = [__version__, list(columns)]
    for name, fn in manager.fns.items():
        if isinstance(fn, RewardModel) and isinstance(fn.worker, ModelWorker):
            parts.append([name, weights_digest(fn.worker.module), str(fn.worker.dtype)])
        else:
            parts.append([name, function_name(fn), *function_source(fn)[1:]])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
