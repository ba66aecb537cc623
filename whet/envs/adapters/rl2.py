"""RL2's environments of September 2025 and later, step(state, action, extra_info) or env_step(sample), as a class.

    async def step(state, action, extra_info):      # rollout.env_path=env.py:step
        return {"next_state": state + action + result, "reward": 0.0, "done": False, "extra_info": extra_info}

    async def reset(extra_info): ...                # optional: (the text that follows the prompt, extra_info)

    async def env_step(sample): ...                 # rollout.env_path=env.py:env_step

A next_state that does not begin with the text before it begins another sequence of the episode, as in RL2. Left out on
purpose: a function generate of one's own.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from whet.envs.transcript import REPLACES
from whet.types import Message

__all__ = ["STEPS", "step_environment", "without_rl2"]

STEPS = ("step", "env_step")
"""The functions that an environment may be named by."""


def step_environment(function: Callable[..., Any]) -> type:
    """Returns a class of environments from a function step(state, action, extra_info) or env_step(sample).

    The state is the text of the conversation: a plain prompt, or the contents of its messages, and what follows. The
    reward is the sum of the steps' rewards.

    Args: function: plain or async. The function `reset` of its module is called too, if there is one.
    """

    class Steps:
        _wrapped = staticmethod(function)
        takes_row = True

        async def reset(self, prompt: Any, columns: Mapping[str, Any]) -> str | None:
            """Begins an episode. Args: columns: of the row, but for that of the prompt."""
            self.total, self.done = 0.0, False
            self.row = {"prompt" if isinstance(prompt, str) else "messages": prompt, **columns}
            self.state = prompt if isinstance(prompt, str) else "".join(str(m["content"]) for m in prompt)
            self.extra_info: Any = dict(columns)
            if (reset := function.__globals__.get("reset")) is None or function.__name__ != "step":
                return None
            text, self.extra_info = await _result(reset(self.extra_info))
            self.state += text
            return text

        async def step(self, message: Mapping[str, Any]) -> str | list[Message]:
            """Answers a turn of the model."""
            action = str(message["content"])
            if function.__name__ == "step":
                result = await _result(function(self.state, action, self.extra_info))
            else:
                sample = SimpleNamespace(state_text=self.state, action_text=action, sample=self.row)
                result = await _result(function(sample))
            self.total += float(result["reward"])
            self.done = bool(result["done"])
            self.extra_info = result.get("extra_info", self.extra_info)
            before, after = self.state + action, result.get("next_state")
            if self.done or after is None:
                self.done = True
                return ""
            self.state = after
            if not after.startswith(before):
                return [{"role": "user", "content": after, REPLACES: True}]
            return after[len(before) :]

        def get_reward(self) -> float:
            """Returns the sum of the rewards."""
            return self.total

    Steps.__name__ = function.__name__
    return Steps


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@contextmanager
def without_rl2() -> Iterator[None]:
    """Lets a file import RL2's names for its `generate`, which whet does not call, where RL2 is not installed."""
    if importlib.util.find_spec("RL2") is not None:
        yield
        return
    package, datasets = ModuleType("RL2"), ModuleType("RL2.datasets")
    vars(package)["datasets"] = datasets
    vars(datasets).update(Sample=SimpleNamespace, base_generate=lambda *_, **__: None)
    sys.modules |= {"RL2": package, "RL2.datasets": datasets}
    try:
        yield
    finally:
        del sys.modules["RL2"], sys.modules["RL2.datasets"]
