"""Reward functions of one conversation: fn(messages, answer) -> float, RL2's form, as functions of a batch.

They are known by their signature, and called for one trajectory after the other, with a conversation each: the
prompt's messages and what was said since, tools and user included. A prompt of plain text is a user's turn.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.types import Message

__all__ = ["conversation", "is_of_conversation", "of_conversation"]


def is_of_conversation(fn: Callable[..., Any]) -> bool:
    """Whether a function takes messages and answer, and nothing else that it must be given.

    >>> is_of_conversation(lambda messages, answer, **more: 1.0), is_of_conversation(lambda completions, answer: [1.0])
    (True, False)
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in needed] == ["messages", "answer"]


def conversation(prompt: Any, completion: Any) -> list[Message]:
    """A prompt and its completion, texts or messages, as one conversation.

    >>> conversation("2+2=", "4")
    [{'role': 'user', 'content': '2+2='}, {'role': 'assistant', 'content': '4'}]
    """
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    return asked + said


def of_conversation(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a batch, under the name and source of one that judges a single conversation.

    Args: fn: fn(messages, answer) -> a number, or None where it does not apply; plain or async.
    Returns: fn(prompts, completions, answer), each [N].
    Source: RL2's reward_fn; there it is called as soon as a trajectory has ended.

    >>> exact = of_conversation(lambda messages, answer: float(messages[-1]["content"] == answer))
    >>> exact(prompts=["2+2=", "1+1="], completions=["4", "3"], answer=["4", "2"])
    [1.0, 0.0]
    """

    def calls(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
        each = zip(map(conversation, prompts, completions), answer, strict=True)
        return [fn(messages, right) for messages, right in each]

    def judged(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
        return calls(prompts, completions, answer)

    async def judged_together(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
        import asyncio  # here, since worker processes of rewards start without

        return list(await asyncio.gather(*calls(prompts, completions, answer)))

    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
    batched: Any = judged_together if is_async else judged
    signature = inspect.signature(batched)
    functools.update_wrapper(batched, fn)
    batched.__signature__ = signature  # else that of `fn`, which it wraps
    batched.per_completion = True
    return batched
