"""`whet env check`: plays the environment of a run with scripted agents, and says what would go wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from whet.cli.data import check_inputs
from whet.cli.resolve_defaults import make_encoder, with_template
from whet.cli.rows import load_train_and_eval
from whet.config import Mode, RunConfig
from whet.data.read_errors import iterate_rows
from whet.data.tokenizer import load_tokenizer, stop_token_ids
from whet.envs import Conversation, load_script
from whet.envs.check import check_environment
from whet.errors import ConfigError
from whet.rewards.manager import RewardManager
from whet.types import Group

__all__ = ["env_check"]

TURN_TOKENS = 512
"""max_tokens_to_generate where it is not set."""


def env_check(config: RunConfig, *, rows: int = 3, gold: str = "answer", say: Callable[[str], None]) -> None:
    """Checks the environment of a run.

    Args: config: of the run. rows: the number of rows to play. gold: the column with the right answer. say: prints
        lines.
    Raises: ConfigError: no environment, no data, no tokenizer; an environment that can't be loaded.
    """
    rollout = config.rollout
    if rollout.env_path is None:
        raise ConfigError("there is no environment to check; write rollout.env_path=file.py or file.py:Class")
    model = check_inputs(config)
    train, _ = load_train_and_eval(config)
    tokenizer = load_tokenizer(config.tokenizer or model, trust_remote_code=config.actor.trust_remote_code)
    config = with_template(config, tokenizer, train)
    rollout = dataclasses.replace(config.rollout, max_prompt_length=None, on_long_prompt="error")
    encode = make_encoder(dataclasses.replace(config, rollout=rollout), tokenizer, Mode.TRAIN)
    prompts = [encode(row, i) for i, row in zip(range(rows), iterate_rows(train, "the data"), strict=False)]
    each: int | None = rollout.max_tokens_to_generate
    script = load_script(rollout.env_path, turns=rollout.max_turns)
    talk = Conversation(
        script,
        encode,
        end_ids=rollout.eos_tokens or stop_token_ids(tokenizer),
        max_turns=rollout.max_turns,
        max_tokens=rollout.max_episode_tokens or rollout.max_turns * (each or TURN_TOKENS),
        timeout_s=rollout.turn_timeout_s,
        tool_timeout_s=rollout.tool_timeout_s,
        episode_timeout_s=rollout.episode_timeout_s,
    )
    has_own = script.environment is not None and script.environment.has_reward
    report = check_environment(talk, [p for p in prompts if p is not None], _reward(config, has_own), gold)
    for fact in report.facts:
        say(fact)
    for problem in report.problems:
        say(f"problem: {problem}")
    if not report.problems:
        say(f"nothing wrong found in {len(prompts)} rows")


def _reward(config: RunConfig, has_own: bool) -> Callable[[Group, Sequence[Any]], float]:
    """Returns the total reward of an episode. Args: has_own: whether the environment gives a reward."""
    names = list(config.reward_names)
    manager = RewardManager(
        names,
        config.reward_weights,
        timeout_s=config.trainer.reward_timeout_s,
        groups_have_rewards=has_own and not names,
    )
    return lambda group, messages: float(manager([group], [messages]).total[0])
