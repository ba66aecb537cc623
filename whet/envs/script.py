"""The file of an environment, with interact(messages), reward_fn(messages, answer) and TOOL; or a class.

    env.py:Class                             # one instance for each episode (environment.py)

A file has functions for all episodes; each is optional:

    def interact(messages):                  # a list of new messages; [] ends the episode
        query = parse(messages[-1]["content"])
        return [] if query is None else [{"role": "tool", "content": search(query)}]

    def reward_fn(messages, answer):         # of the whole conversation; `answer` is the row's column
        return float(parse_answer(messages[-1]["content"]) == answer)

    TOOL = {"type": "function", ...}         # or a list of them, for the chat template's `tools`

Source: RL2's environments of July 2025. Its later forms are named by their function, env.py:step or env.py:env_step
(adapters/rl2.py). Left out on purpose: a function generate of one's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from whet.envs.adapters.rl2 import STEPS, step_environment, without_rl2
from whet.envs.environment import EnvironmentClass
from whet.errors import ConfigError, format_value
from whet.util.references import is_ref, resolve_module, resolve_ref

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
"""A function that only a later form of RL2's environments has -> the form, and the counterparts of its arguments."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """The environment of a file or a function."""

    name: str
    """Its file, module or function, for messages."""
    interact: Callable[..., Any] | None = None
    """Plain or async. Called between two turns with the messages so far; returns the next ones, [] = the episode has
    ended."""
    reward_fn: Callable[..., Any] | None = None
    """The reward of a conversation."""
    tools: tuple[Any, ...] = ()
    """Descriptions of tools, for the chat template."""
    environment: EnvironmentClass | None = None
    """The class, in place of interact and reward_fn."""

    @property
    def code(self) -> Callable[..., Any] | None:
        """The user's code that answers the model."""
        if self.environment is None:
            return self.interact
        return getattr(self.environment.kind, "_wrapped", self.environment.kind)


def load_script(source: Any, *, turns: int = 1) -> Script:
    """Returns the environment that rollout.env_path names.

    Args: source: "file.py" or "package.module", "file.py:Class" or "package.module:Class", the function interact
        itself, or a class. turns: of an episode; more than one need interact or a class.
    Raises: ConfigError: no such file or module; neither interact nor reward_fn; interact is missing, or takes something
        else; TOOL is neither a mapping nor a list of them; no class, or one that EnvironmentClass refuses; a class with
        tools and one turn.

    >>> load_script(lambda messages: [], turns=2).reward_fn is None
    True
    """
    if isinstance(source, str) and is_ref(source):
        name = source.rpartition(":")[2]
        with without_rl2() if name in STEPS else nullcontext():
            kind = resolve_ref(source, "environment")
        if name in STEPS and inspect.isfunction(kind):
            kind = step_environment(kind)
        if not inspect.isclass(kind):
            raise ConfigError(
                f"environment {source!r} is {format_value(kind, 60)}, not a class; name a class, or the file alone for "
                "its interact and reward_fn"
            )
        source = kind
    if inspect.isclass(source):
        environment = EnvironmentClass(source)
        if turns == 1 and environment.tool_names:
            raise ConfigError(
                f"environment {environment.name} has tools ({', '.join(environment.tool_names)}), and with "
                "rollout.max_turns=1 the model has no turn after a call; set rollout.max_turns=2 or more"
            )
        return Script(name=environment.name, tools=tuple(environment.tools.schemas), environment=environment)
    if callable(source):
        script = Script(name=getattr(source, "__name__", type(source).__name__), interact=source)
    else:
        module = _load_names(source)
        tool = module.get("TOOL")
        tools = (tool,) if isinstance(tool, Mapping) or callable(tool) else tuple(tool or ())
        script = Script(
            name=source,
            interact=module.get("interact"),
            reward_fn=module.get("reward_fn"),
            tools=_check_tools(tools, source),
        )
        if not callable(script.interact) and not callable(script.reward_fn):
            if form := next((form for form in OTHER_FORMS if form in module), None):
                raise _other_form_error(source, form)
            raise ConfigError(
                f"environment {source!r} has neither interact(messages) nor reward_fn(messages, answer); write one"
            )
    if turns > 1:
        _check_interact(script)
    return script


def _load_names(source: str) -> Mapping[str, Any]:
    """Returns the names of a file or module. Raises ConfigError: it can't be imported, or has another form."""
    try:
        return vars(resolve_module(source, "environment"))
    except ConfigError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and str(missing.name).partition(".")[0] == "RL2":
            raise _other_form_error(source, "generate") from error
        raise


def _other_form_error(source: str, form: str) -> ConfigError:
    """Returns the error for a later form of RL2's environments, with what to write instead. Args: form: of
    OTHER_FORMS.
    """
    name, counterparts = OTHER_FORMS[form]
    return ConfigError(
        f"environment {source!r} is written for a later form of RL2's environments, {name}; name its function "
        "(env_path=file.py:step, file.py:env_step), or write a file with reward_fn(messages, answer) and, for several "
        "turns, interact(messages). To convert it: return the reward of the last turn from "
        "reward_fn(messages, answer); return the text added in "
        'next_state from interact(messages), as [{"role": "user", "content": text}], and [] for done; '
        f"{counterparts}; put other columns of a row into answer; remove the imports from RL2. "
        "docs/from-rl2.md shows a file in both forms"
    )


def _check_interact(script: Script) -> None:
    """Raises ConfigError: interact can't be called between two turns."""
    fn = script.interact
    if not callable(fn):
        raise ConfigError(
            f"environment {script.name!r} has no interact(messages), which rollout.max_turns above 1 calls; write it, "
            "or set rollout.max_turns=1"
        )
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise ConfigError(
            f"interact of {script.name!r} is a generator, since it yields; write return: it returns a list of messages"
        )
    try:
        inspect.signature(fn).bind([])
    except TypeError as error:
        raise ConfigError(f"interact of {script.name!r} is called as interact(messages): {error}") from error
    except ValueError:  # a builtin has no signature
        return


def _check_tools(tools: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Returns the tools, unchanged. Raises ConfigError: a chat template does not accept one."""
    for tool in tools:
        if not isinstance(tool, Mapping) and not callable(tool):
            raise ConfigError(
                f"environment {name!r}: TOOL holds {format_value(tool, 60)}; give a mapping, or a list of them"
            )
    return tools
