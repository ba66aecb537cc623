"""Who judges completions: the reward functions of an evaluation, a reward model among them, and a digest of them."""

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
from whet.run.provenance import source_of, weights_digest
from whet.train.worker import ModelWorker
from whet.util.model_paths import model_folder

__all__ = ["hash_reward_functions", "make_reward_manager"]


def make_reward_manager(config: EvalRunConfig, sampler: Sampler, reward_fns: Any = None) -> RewardManager:
    """The reward functions of an evaluation.

    Args: config: its reward, weights, reward model and limits. sampler: whose completions are judged. reward_fns: from
        Python, in place of config.reward: one or a list.
    Raises: ConfigError: as RewardManager does, or a reward model that can't be loaded.
    """
    given = list(config.reward_names) if reward_fns is None else reward_fns
    weights = config.reward_weights if reward_fns is None else None
    if config.reward_model is not None:
        given = with_reward_model(given, _reward_model(config, config.reward_model, sampler))
    return RewardManager(
        given,
        weights,
        on_error=config.on_reward_error,
        timeout_s=config.reward_timeout_s,
        workers=config.reward_workers,
    )


def _reward_model(config: EvalRunConfig, section: RoleConfig, sampler: Sampler) -> RewardModel:
    """The reward model of a section, on the device of the model that is evaluated."""
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
    place = Path(model_folder(section.model))
    has_own = not place.is_dir() or any((place / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json"))
    return RewardModel(
        worker,
        name=loaded.name.rstrip("/").rpartition("/")[2],
        policy_tokenizer=sampler.tokenizer,
        tokenizer=load_tokenizer(section.model, trust_remote_code=section.trust_remote_code) if has_own else None,
        apply_chat_template=config.data.apply_chat_template,  # pyright: ignore[reportArgumentType]  (auto is settled)
        system_prompt=config.data.system_prompt,
    )


def hash_reward_functions(manager: RewardManager, columns: Sequence[int]) -> str:
    """A digest of the functions that judge, the files they are written in, and the columns that they are given.

    Args: columns: the digests of the data (data.order.digests).
    """
    found: list[Any] = [__version__, list(columns)]
    for name, fn in manager.fns.items():
        if isinstance(fn, RewardModel) and isinstance(fn.worker, ModelWorker):
            found.append([name, weights_digest(fn.worker.module), str(fn.worker.dtype)])
        else:
            found.append([name, function_name(fn), *source_of(fn)[1:]])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
