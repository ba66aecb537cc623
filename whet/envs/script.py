"""The file of an environment: interact(messages), reward_fn(messages, answer) and TOOL, each of them or none.

    def interact(messages):                  # a list of new messages; [] ends the episode
        query = parse(messages[-1]["content"])
        return [] if query is None else [{"role": "tool", "content": search(query)}]

    def reward_fn(messages, answer):         # of the whole conversation; `answer` is the row's column
        return float(parse_answer(messages[-1]["content"]) == answer)

    TOOL = {"type": "function", ...}         # or a list of them: the chat template is given it as `tools`

Source: RL2's environments of July 2025. Left out on purpose: its later forms (step and reset, generate), which are
refused with what to write in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from whet.errors import ConfigError, format_value
from whet.util.references import resolve_module

__all__ = ["Script", "load_script"]

OTHER_FORMS = {
    "generate": (
        "generate(config, tokenizer, router_url, sample) and env_step(sample)",
        'sample.action_text is messages[-1]["content"] and sample.sample["answer"] is answer',
    ),
    "step": (
        "step(state, action, extra_info), with or without reset",
        'action is messages[-1]["content"] and extra_info["answer"] is answer',
    ),
}
"""Function by which a later form of RL2's environments is known -> the form, and where it finds what whet gives."""


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
        module = _module(given)
        tool = module.get("TOOL")
        tools = (tool,) if isinstance(tool, Mapping) or callable(tool) else tuple(tool or ())
        found = Script(
            name=given, interact=module.get("interact"), reward_fn=module.get("reward_fn"), tools=_tools(tools, given)
        )
        if not callable(found.interact) and not callable(found.reward_fn):
            if form := next((form for form in OTHER_FORMS if form in module), None):
                raise _of_other_form(given, form)
            raise ConfigError(
                f"environment {given!r} has neither interact(messages) nor reward_fn(messages, answer); write one"
            )
    if turns > 1:
        _check_interact(found)
    return found


def _module(given: str) -> Mapping[str, Any]:
    """What a file or module holds. Raises ConfigError: it can't be imported, or is of another form."""
    try:
        return vars(resolve_module(given, "environment"))
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and str(missing.name).partition(".")[0] == "RL2":
            raise _of_other_form(given, "generate") from error
        raise


def _of_other_form(given: str, form: str) -> ConfigError:
    """What to write in the place of a later form of RL2's environments. Args: form: of OTHER_FORMS."""
    name, found = OTHER_FORMS[form]
    return ConfigError(
        f"environment {given!r} is written for a later form of RL2's environments, {name}, which whet does not take "
        "yet: it takes a file with reward_fn(messages, answer) and, for several turns, interact(messages). Write it "
        "so: the reward of the last turn is what reward_fn(messages, answer) returns; what is added in next_state is "
        'what interact(messages) returns, as [{"role": "user", "content": text}], and [] stands for done; '
        f"{found}; other columns of a row go into answer; imports from RL2 are left out. "
        "docs/from-rl2.md shows a file in both forms"
    )


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
            raise ConfigError(
                f"environment {name!r}: TOOL holds {format_value(tool, 60)}; give a mapping, or a list of them"
            )
    return tools
