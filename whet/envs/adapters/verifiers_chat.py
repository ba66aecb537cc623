"""The harness whet-chat of verifiers, which imports it by its id: one call of the model for each turn."""

from __future__ import annotations

from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ProgramResult  # pyright: ignore
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore

__all__ = ["WhetChat"]


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
