"""The file of an environment: interact(messages), reward_fn(messages, answer) and TOOL, each of them or none.

    def interact(messages):                  # a list of new messages; [] ends the episode
        query = parse(messages[-1]["content"])
        return [] if query is None else [{"role": "tool", "content": search(query)}]

    def reward_fn(messages, answer):         # of the whole conversation; `answer` is the row's column
        return float(parse_answer(messages[-1]["content"]) == answer)

    TOOL = {"type": "function", ...}         # or a list of them: the chat template is given it as `tools`

Source: RL2's environments of July 2025. Left out on purpose: its later forms (step and reset, generate).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError, shown
from whet.util.refs import resolve_module

__all__ = ["Script", "load_script"]

OTHER_FORMS = {"step": "step(state, action, extra_info)", "generate": "generate(config, tokenizer, router_url, sample)"}
"""Functions by which the later forms of RL2's environments are known."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a file, or a function, brings of an environment."""

    name: str
    """Its file, module or function, for messages."""
    interact: Callable[..., Any] | None = None
    """Called between two turns with the messages so far; gives those that follow, [] = the episode has ended."""
    reward_fn: Callable[..., Any] | None = None
    """The reward of a conversation."""
    tools: tuple[Any, ...] = ()
    """Descriptions of tools, for the chat template."""


def load_script(given: Any, *, turns: int = 1) -> Script:
    """The environment that rollout.env_path names.

    Args: given: "file.py", "package.module", or the function interact itself. turns: of an episode; above 1 interact
        is needed.
    Raises: ConfigError: no such file or module; neither interact nor reward_fn; interact is missing, async, or takes
        something else; TOOL is neither a mapping nor a list of them.

    >>> load_script(lambda messages: [], turns=2).reward_fn is None
    True
    """
    if callable(given):
        found = Script(name=getattr(given, "__name__", type(given).__name__), interact=given)
    else:
        module = vars(resolve_module(given, "environment"))
        tool = module.get("TOOL")
        tools = (tool,) if isinstance(tool, Mapping) or callable(tool) else tuple(tool or ())
        found = Script(
            name=given, interact=module.get("interact"), reward_fn=module.get("reward_fn"), tools=_tools(tools, given)
        )
        if not callable(found.interact) and not callable(found.reward_fn):
            other = next(
                (f"; {form} is of another generation of RL2" for n, form in OTHER_FORMS.items() if n in module), ""
            )
            raise ConfigError(
                f"environment {given!r} has neither interact(messages) nor reward_fn(messages, answer){other}; "
                "write one"
            )
    if turns > 1:
        _check_interact(found)
    return found


def _check_interact(script: Script) -> None:
    """Raises ConfigError where interact can't be called between two turns."""
    fn = script.interact
    if not callable(fn):
        raise ConfigError(
            f"environment {script.name!r} has no interact(messages), which rollout.max_turns above 1 calls; write it"
        )
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        raise ConfigError(f"interact of {script.name!r} is async; in this release it is a plain function")
    try:
        inspect.signature(fn).bind([])
    except TypeError as error:
        raise ConfigError(f"interact of {script.name!r} is called as interact(messages): {error}") from error
    except ValueError:  # a builtin: calling it will tell
        return


def _tools(tools: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The same. Raises ConfigError: not what a chat template takes."""
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise ConfigError(f"environment {name!r}: TOOL holds {shown(tool, 60)}; give a mapping, or a list of them")
    return tools
