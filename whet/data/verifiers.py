"""Tasksets of the package verifiers as a data set: `data=verifiers:my-taskset?difficulty=easy`.

The name after the colon is an installed taskset. Options after "?" are fields of its configuration ("task.x" for one of
its tasks' configuration), and `size`, the number of tasks to take. Only tasks that one answer of the model solves are
rows: without tools, containers, further turns of a user or preparation.
Columns: prompt (a conversation), task (the name with its options) and index (the task's number there), from which the
reward function `verifiers` (whet/rewards/verifiers.py) finds the task again and scores a completion as the task does.
Left out on purpose: tasksets with several turns; environments for those are whet's own (rollout.env_path).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

from whet.data.source_options import source_options
from whet.errors import ConfigError, DataError, format_exception
from whet.util.install import install_hint

__all__ = ["PREFIX", "check_taskset", "load_tasks", "taskset_rows"]

PREFIX = "verifiers:"


def taskset_rows(source: str, split: str | None) -> list[dict[str, Any]]:
    """Returns the rows of a split.

    Args: source: "verifiers:name?option=value&...". split: the value of the taskset's own option `split`, unless the
        source sets it. A taskset without that option has only "train". None = the taskset's default.
    Returns: dicts with prompt, task and index.
    Raises: ConfigError: the extra is missing, there is no such taskset or option, or a task needs more than one answer.
        DataError: the taskset has no splits, and the split is not "train".

    Example: taskset_rows("verifiers:gsm8k?size=100", "train").
    """
    task = source.removeprefix(PREFIX)
    _, options, fields = _parse(task)
    if split is not None and "split" in fields and "split" not in options:
        task += f"{'&' if options else '?'}split={split}"
    elif split not in ("train", None) and "split" not in options:
        raise DataError(f"{source!r} has no split {split!r}: its taskset has no option split; use data.eval_fraction")
    tasks = load_tasks(task)
    return [{"prompt": _messages(each), "task": task, "index": index} for index, each in enumerate(tasks)]


def check_taskset(source: str) -> None:
    """Raises ConfigError unless the taskset is installed and has the options."""
    _parse(source.removeprefix(PREFIX))


@functools.lru_cache(maxsize=16)
def load_tasks(task: str) -> list[Any]:
    """Returns the tasks that a row's column `task` names, each checked to need one answer only."""
    config_class, options, _ = _parse(task)
    from verifiers.v1.utils.loaders import environment_class, load_taskset  # pyright: ignore[reportMissingImports]

    name = task.partition("?")[0]
    size = options.pop("size", None)
    try:
        config = config_class.model_validate({**_nested(options), "id": name})
        taskset = load_taskset(config)
        if size is None and not taskset.bounded:
            raise ConfigError(f"{PREFIX}{task} makes tasks without end; say how many: {PREFIX}{name}?size=1000")
        tasks = list(itertools.islice(taskset, size))
    except ConfigError:
        raise
    except Exception as error:  # a taskset's own code, which may also read files and the hub
        raise ConfigError(
            f"verifiers can't load {task!r} ({format_exception(error)}); check its name and options"
        ) from error
    environment = environment_class(name)
    if environment.__name__ != "SingleAgentEnv":
        raise ConfigError(f"{PREFIX}{name} has an environment of its own ({environment.__name__}); {_ONE_ANSWER}")
    for each in {type(each): each for each in tasks}.values():
        _check_one_answer(f"{PREFIX}{name}", taskset, each)
    return tasks


_ONE_ANSWER = "whet takes tasks that one answer solves; for others write an environment (rollout.env_path)"


def _check_one_answer(source: str, taskset: Any, task: Any) -> None:
    """Raises ConfigError where a task needs tools, a container, a prepared runtime or a user's first turn."""
    from verifiers.v1 import Task  # pyright: ignore[reportMissingImports]

    cls = type(task)
    needs_runtime = [
        hook.__name__
        for hook in (*task.hooks("reward"), *task.hooks("metric"))
        if (runtime := inspect.signature(hook).parameters.get("runtime")) and runtime.default is inspect.Parameter.empty
    ]
    reason = (
        "needs a container"
        if cls.NEEDS_CONTAINER
        else "has tools"
        if cls.toolsets(task.config) or type(taskset).toolsets(taskset.config)
        else "has no prompt"
        if task.data.prompt is None
        else "prepares a runtime"
        if cls.setup is not Task.setup or cls.finalize is not Task.finalize
        else f"scores with a runtime ({', '.join(needs_runtime)})"
        if needs_runtime
        else None
    )
    if reason is not None:
        raise ConfigError(f"{source}: a task of class {cls.__name__} {reason}; {_ONE_ANSWER}")


def _messages(task: Any) -> list[dict[str, Any]]:
    """Returns the conversation that a task begins with."""
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]


def _parse(text: str) -> tuple[type[Any], dict[str, Any], list[str]]:
    """Of "name?option=value&...": the class of the taskset's configuration, the options, and that class's fields."""
    name = text.partition("?")[0]
    try:
        from verifiers.v1.utils.loaders import taskset_config_type  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"tasksets of verifiers need the package: {install_hint('verifiers')} ({format_exception(error)})"
        ) from error
    try:
        config_class = taskset_config_type(name)
    except Exception as error:  # no such module, or one that exports no taskset or fails when it is imported
        raise ConfigError(
            f"verifiers has no taskset {name!r} ({format_exception(error)}); install the package that has it"
        ) from error
    fields = sorted({*config_class.model_fields} - {"id"})
    options = source_options(f"{PREFIX}{text}", ["size", *fields], {"size": 1}, dotted=True)
    return config_class, options, fields


def _nested(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options with dots in their names as mappings in mappings: {"task.x": 1} -> {"task": {"x": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
