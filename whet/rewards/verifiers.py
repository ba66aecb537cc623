"""The reward of the package verifiers' tasks: the weighted sum of a task's own rewards.

Left out on purpose: a column for each of a task's rewards; the task has the weights.
"""

from __future__ import annotations

import asyncio
from typing import Any

from whet.data.verifiers import load_tasks
from whet.rewards.text import text_of

__all__ = ["verifiers"]


async def verifiers(
    prompts: list[Any], completions: list[Any], task: list[str], index: list[int], **_: Any
) -> list[float]:
    """Returns the score that verifiers gives each completion: the weighted sum of the task's rewards and judges.

    Args: prompts, completions: conversations. task, index: columns of the rows that `data=verifiers:...` makes.
    Returns: a score per completion.
    Raises: verifiers.v1.TaskError: a reward of the task failed.

    Example: rewards `verifiers` with data `verifiers:my-taskset`.
    """
    rows = zip(prompts, completions, task, index, strict=True)
    return list(await asyncio.gather(*(_score(load_tasks(name)[int(i)], p, text_of(c)) for p, c, name, i in rows)))


async def _score(task: Any, prompt: list[dict[str, Any]], completion: str) -> float:
    """Returns the score that a task gives one completion."""
    from verifiers import v1  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]

    answer = v1.AssistantMessage(content=completion)
    trace = v1.Trace(
        task=v1.TraceTask(type=type(task).__name__, data=task.data),
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        state=state_cls(type(task))(),
        is_completed=True,
        ok=True,
    )
    for message in (*prompt, answer):
        parent = len(trace.nodes) - 1 if trace.nodes else None
        trace.nodes.append(v1.MessageNode(parent=parent, message=message, sampled=message is answer))
    await task.score(trace)
    return trace.reward
