"""Verifiers: an environment of verifiers as rollout.agent, since it owns the loop and calls a model at a base URL.

    # game.py
    from whet.envs.adapters.verifiers import Verifiers

    game = Verifiers(taskset={"id": "my-taskset"}, agent={"harness": {"id": "null"}})
    agent, rows = game.agent, game.rows

    whet grpo data=game.py:rows rollout.agent=game.py:agent ...
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from whet.errors import ConfigError
from whet.util.install import install_hint

__all__ = ["Verifiers"]


class Verifiers:
    """An environment of verifiers.

    Args:
        size: the number of tasks, for tasksets without end.
        env: the environment as verifiers' section [env] describes it: its id, the taskset, and each role with its
            harness.
    Raises: ConfigError: the extra is missing.
    """

    def __init__(self, size: int | None = None, **env: Any) -> None:
        try:
            from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
                load_taskset,
                resolve_env_config,
            )
        except ImportError as error:
            raise ConfigError(f"environments of verifiers need the package; {install_hint('verifiers')}") from error
        self.config: Any = resolve_env_config(env)
        taskset = load_taskset(self.config.taskset)
        if size is None and not taskset.bounded:
            raise ConfigError(f"{self.config.taskset.id} makes tasks without end; say how many: Verifiers(size=1000)")
        self.tasks: list[Any] = list(itertools.islice(taskset, size))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each task; the environment knows the whole prompt itself."""
        return [{"prompt": str(task.data.prompt or task.data.name), "index": i} for i, task in enumerate(self.tasks)]

    async def agent(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
        """Plays an episode.

        Args: base_url, api_key: of the episode's model. row: of `rows`.
        Returns: the mean reward of the environment's traces.
        Raises: RuntimeError: the environment reports an error.
        """
        from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
        from verifiers.v1.configs.client import EvalClientConfig  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import load_environment  # pyright: ignore[reportMissingImports]

        variable = f"WHET_AGENT_{api_key.partition('-')[0]}"  # verifiers reads keys from variables only
        os.environ[variable] = api_key
        try:
            environment = load_environment(self.config)
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            async with environment.serving():
                episode = await environment.run_episode(
                    self.tasks[row["index"]], ModelContext(model="policy", client=client)
                )
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        return sum(trace.reward for trace in episode.traces) / len(episode.traces)
