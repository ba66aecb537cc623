"""The user's agent: a program that calls the model at a base URL, and is an episode (serve/agent_episodes.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from whet.errors import ConfigError, format_value
from whet.rewards.call import function_name
from whet.util.references import resolve_callable

__all__ = ["AGENT_REWARD", "load_agent"]

AGENT_REWARD = "agent"
"""The name of the reward that an agent returns."""


def load_agent(source: Any) -> Callable[..., Any]:
    """Returns the agent that rollout.agent names.

    Args: source: "file.py:function", "package.module:function", or the function itself.
    Raises: ConfigError: it can't be found, is a generator, or is not called with (base_url, api_key,
        row).

    >>> load_agent(lambda base_url, api_key, row: 0.0).__name__
    '<lambda>'
    """
    agent = resolve_callable(source, "agent") if isinstance(source, str) else source
    if not callable(agent):
        raise ConfigError(f"agent {format_value(agent, 60)} is not a function; write agent(base_url, api_key, row)")
    call = agent if inspect.isroutine(agent) else type(agent).__call__
    if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise ConfigError(
            f"agent {function_name(agent)} is a generator, since it yields; an agent runs one episode and returns its "
            "reward: write return"
        )
    try:
        inspect.signature(agent).bind(base_url="", api_key="", row={})
    except TypeError as error:
        raise ConfigError(
            f"agent {function_name(agent)} is called as agent(base_url=..., api_key=..., row=...): {error}"
        ) from error
    except ValueError:  # a builtin has no signature
        pass
    return agent
