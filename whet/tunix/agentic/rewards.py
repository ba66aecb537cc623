"""Tunix's rewards of an action: functions of (task, action) by name."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.errors import ConfigError, lookup_error

__all__ = [
    "RewardOutput",
    "calculate_reward",
    "combine_rewards",
    "dummy_reward",
    "exact_match",
    "get_reward_fn",
    "is_two_reward",
    "register",
    "unregister",
]


@dataclass
class RewardOutput:
    """A reward, and what else is known about it."""

    reward: float
    metadata: dict[str, Any] = field(default_factory=dict)


ActionReward = Callable[[Mapping[str, Any], str], RewardOutput]
_REGISTRY: dict[str, ActionReward] = {}


def register(name: str) -> Callable[[ActionReward], ActionReward]:
    """Gives a function a name, as a decorator. Raises ConfigError (a ValueError): the name is taken."""

    def add(fn: ActionReward) -> ActionReward:
        if name in _REGISTRY:
            raise ConfigError(f"Reward {name} already registered; unregister it, or take another name")
        _REGISTRY[name] = fn
        return fn

    return add


def unregister(name: str) -> bool:
    """Takes a name away. Returns: whether it was there."""
    return _REGISTRY.pop(name, None) is not None


class UnknownReward(ConfigError, KeyError):
    """No reward has this name. It is a KeyError too, which Tunix raises."""

    __str__ = ConfigError.__str__


def get_reward_fn(name: str) -> ActionReward:
    """Returns the function of a name. Raises UnknownReward: there is none.

    >>> get_reward_fn("exact_match")({"ground_truth": "4"}, " 4 ").reward
    1.0
    """
    if name not in _REGISTRY:
        raise UnknownReward(str(lookup_error("reward", name, _REGISTRY)))
    return _REGISTRY[name]


def combine_rewards(weights: Mapping[str, float]) -> ActionReward:
    """Returns the weighted sum of named functions.

    >>> combine_rewards({"exact_match": 0.5, "is_two": 1.0})({"ground_truth": "2"}, "2").reward
    1.5
    """

    def combined(task: Mapping[str, Any], action: str) -> RewardOutput:
        outputs = [(weight, get_reward_fn(name)(task, action)) for name, weight in weights.items()]
        metadata = {key: value for _, output in outputs for key, value in output.metadata.items()}
        return RewardOutput(sum(weight * output.reward for weight, output in outputs), metadata)

    return combined


@register("exact_match")
def exact_match(task: Mapping[str, Any], action: str) -> RewardOutput:
    """Returns 1 if the action is the task's ground_truth, without the spaces around it."""
    score = float(action.strip() == str(task.get("ground_truth", "")).strip())
    return RewardOutput(score, {"exact_match": score})


@register("is_two")
def is_two_reward(task: Mapping[str, Any], action: str) -> RewardOutput:
    """Returns 1 if the action is the number 2."""
    try:
        score = float(float(action) == 2.0)
    except ValueError:
        score = 0.0
    return RewardOutput(score, {"is_two": score})


@register("dummy")
def dummy_reward(task: Mapping[str, Any], action: str) -> RewardOutput:
    """Returns 0."""
    return RewardOutput(0.0, {})


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
"""Left out on purpose: powers, whose results can be as large as they like."""


def _evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError(f"{ast.unparse(node)} is no sum, difference, product or quotient of numbers")


@register("calculate")
def calculate_reward(task: Mapping[str, Any], action: str) -> RewardOutput:
    """Returns 1 if the action is the value of the task's question, such as "2*3 = ?", within 1e-6.

    >>> calculate_reward({"question": "2*3 = ?"}, "The answer is 6.").reward
    1.0
    """
    expression = str(task.get("question", "")).replace("= ?", "").replace("=", "").strip()
    try:
        answer = float(action.replace("The answer is ", "").strip().rstrip("."))
        score = float(abs(_evaluate(ast.parse(expression, mode="eval").body) - answer) < 1e-6)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError):
        score = 0.0
    return RewardOutput(score, {"calculate_correct": score})
