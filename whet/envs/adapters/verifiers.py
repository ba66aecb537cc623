"""VerifiersAgent: plays the environments of the package verifiers, with further turns, users and tools, as an agent.

    play = VerifiersAgent({"taskset": {"id": "my-taskset"}})    # rollout.agent=file.py:play
    rows = play.rows                                            # data=file.py:rows

verifiers runs the episode: its environment asks the model at the base URL of the run. Rows of tasks that one answer
solves need no agent: `data=verifiers:my-taskset` (data/verifiers.py).
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from whet.errors import ConfigError, InfrastructureError, RewardError, format_exception
from whet.util.install import install_hint

__all__ = ["VerifiersAgent"]

CHAT = "whet-chat"
"""The harness of seats that name none: one call of the model for each turn, in this process."""
HERE = {"runtime": {"type": "subprocess"}}
"""The runtime of such a seat; verifiers' default is a sandbox of its makers' service."""
INFRASTRUCTURE = ("InterceptionError", "ProviderError", "SandboxError", "TunnelError")
"""The errors of verifiers that are no failure of the environment's code."""


class VerifiersAgent:
    """An agent for rollout.agent.

    Args:
        config: verifiers' [env] section: taskset (with `id`), and optionally the id of an environment, its seats with
            their harness, limits and time-outs. A seat without a harness chats in this process, without tools; one with
            {"harness": {"id": "null"}} has tools, and needs `uv`.
        size: of the tasks to take; None = all.
    Raises: ConfigError: the extra is missing, or verifiers refuses the configuration.
    """

    def __init__(self, config: Mapping[str, Any], *, size: int | None = None) -> None:
        self.__name__ = "verifiers"
        self.size = size
        try:
            from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
            from verifiers.v1.utils.loaders import resolve_env_config  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"environments of verifiers need the package: {install_hint('verifiers')} ({format_exception(error)})"
            ) from error
        name = CHAT.replace("-", "_")
        sys.modules.setdefault(name, _chat_module(name))  # verifiers imports a harness by its id
        try:
            resolved = resolve_env_config(dict(config))
            seats = [name for name, seat in agent_config_fields(resolved).items() if seat.harness is None]
            chat = {name: {**HERE, **dict(config.get(name) or {}), "harness": {"id": CHAT}} for name in seats}
            self.config = resolve_env_config({**config, **chat})
        except Exception as error:  # its own checks, and a taskset's code
            raise ConfigError(
                f"verifiers refuses the configuration {dict(config)!r}: {format_exception(error)}"
            ) from error
        self._calls = itertools.count()

    @functools.cached_property
    def tasks(self) -> list[Any]:
        """The tasks. Raises ConfigError: there is no end of them, and no size."""
        from verifiers.v1.utils.loaders import load_taskset  # pyright: ignore[reportMissingImports]

        taskset = load_taskset(self.config.taskset)
        if self.size is None and not taskset.bounded:
            raise ConfigError(f"taskset {self.config.taskset.id} makes tasks without end; pass size=1000")
        return list(itertools.islice(taskset, self.size))

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each task: its text, and its number."""
        return [{"prompt": task.data.prompt_text or "-", "index": i} for i, task in enumerate(self.tasks)]

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
        """Plays a task. Returns: the rewards of all seats that are trained.

        Raises: InfrastructureError, RewardError: the episode failed.
        """
        from verifiers import v1  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from verifiers.v1.utils.loaders import load_environment  # pyright: ignore[reportMissingImports]

        variable = f"WHET_EPISODE_KEY_{os.getpid()}_{next(self._calls)}"  # verifiers takes a key by its variable alone
        os.environ[variable] = api_key
        try:
            client = v1.EvalClientConfig(base_url=base_url, api_key_var=variable)
            environment = load_environment(self.config)
            async with environment.serving():
                context = v1.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(self.tasks[int(row["index"])], context)
        finally:
            del os.environ[variable]
        errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
        if not episode.ok and errors:
            error = errors[0]
            message = f"the episode of verifiers ended with {error.type}: {error.message}"
            raise InfrastructureError(message) if error.type in INFRASTRUCTURE else RewardError(message)
        return float(sum(trace.reward for trace in episode.traces if trace.agent.trainable))


def _chat_module(name: str) -> ModuleType:
    """Returns a module with the harness whet-chat: one call of the model for each turn, in this process."""
    import httpx
    from verifiers.v1 import Harness, HarnessConfig, ProgramResult  # pyright: ignore
    from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore

    class WhetChat(Harness[HarnessConfig]):
        """Asks the model for its next turn, without tools."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> ProgramResult:
            """Calls the model once. Args: endpoint, secret: of the episode. data: the task and the conversation."""
            system, prompt = self.resolve_prompt(data)
            messages = [] if system is None else [{"role": "system", "content": system}]
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            async with httpx.AsyncClient(timeout=None) as client:
                headers, body = {"Authorization": f"Bearer {secret}"}, {"model": ctx.model, "messages": messages}
                response = await client.post(f"{endpoint}/chat/completions", headers=headers, json=body)
            failed = response.is_error
            return ProgramResult(exit_code=int(failed), stdout="", stderr=response.text if failed else "")

    module = ModuleType(name)
    vars(module).update(__all__=["WhetChat"], WhetChat=WhetChat)
    return module
