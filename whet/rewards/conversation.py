"""Turns reward functions of one conversation, fn(messages, answer) -> float (RL2's form), into functions of a batch.

Their signature identifies them. They are called for each trajectory with its conversation: the prompt's messages and
all later ones, tools and user included. A prompt of plain text is a user's turn.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whet.types import Message

__all__ = ["batch_conversation_function", "conversation", "is_conversation_function"]


def is_conversation_function(fn: Callable[..., Any]) -> bool:
    """Returns whether a function's required arguments are messages and answer.

    >>> is_conversation_function(lambda messages, answer, **more: 1.0)
    True
    >>> is_conversation_function(lambda completions, answer: [1.0])
    False
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in needed] == ["messages", "answer"]


def conversation(prompt: Any, completion: Any) -> list[Message]:
    """Joins a prompt and its completion, texts or messages, to one conversation.

    >>> conversation("2+2=", "4")
    [{'role': 'user', 'content': '2+2='}, {'role': 'assistant', 'content': '4'}]
    """
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    return before + after


def batch_conversation_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a function of one conversation into a function of a batch, with the same name and source.

    Args: fn: fn(messages, answer) -> a number, or None if it does not apply; plain or async.
    Returns: fn(prompts, completions, answer), each [N].
    Source: RL2's reward_fn; RL2 calls it as soon as a trajectory has ended.

    >>> exact = batch_conversation_function(lambda messages, answer: float(messages[-1]["content"] == answer))
    >>> exact(prompts=["2+2=", "1+1="], completions=["4", "3"], answer=["4", "2"])
    [1.0, 0.0]
    """

    def calls(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
        rows = zip(map(conversation, prompts, completions), answer, strict=True)
        return [fn(messages, gold) for messages, gold in rows]

    async def async_calls(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any]) -> list[Any]:
        import asyncio  # worker processes start without it

        return list(await asyncio.gather(*calls(prompts, completions, answer)))

    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)
    batched: Any = async_calls if is_async else calls
    signature = inspect.signature(batched)
    functools.update_wrapper(batched, fn)
    batched.__signature__ = signature  # else inspect would show the signature of `fn`
    batched.per_completion = True
    return batched
