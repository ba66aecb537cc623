"""The bodies of requests: OpenAI's fields, and those that vLLM adds. Unknown fields are refused.

Fields that say who asks (user, metadata, ...) are accepted and have no effect. Fields that would change the samples and
are not implemented (frequency_penalty, logit_bias, ...) are accepted only with the value that turns them off.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["ChatBody", "CompletionBody", "GenerateBody", "GenerateSampling", "SamplingBody"]

MAX_CHOICES = 256
"""The most choices of one prompt."""


def _check_off(value: Any) -> Any:
    if value:
        raise ValueError("this server does not implement it; leave it out")
    return value


Off = Annotated[float | None, AfterValidator(_check_off)]
"""A number that only 0 or None turns off."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: bool = False


class SamplingBody(_Body):
    """The sampling fields that all routes share. None = the server's default."""

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    frequency_penalty: Off = None
    presence_penalty: Off = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_check_off)] = None


class OpenAIBody(SamplingBody):
    """The fields that both of OpenAI's routes share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Return the ids of prompt and completion, and the policy versions of the completion."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: Off = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=1)
    echo: Annotated[bool, AfterValidator(_check_off)] = False
    best_of: Annotated[int | None, AfterValidator(lambda value: None if value == 1 else _check_off(value))] = None
    suffix: Annotated[str | None, AfterValidator(_check_off)] = None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        is_one = bool(self.prompt) and isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # pyright: ignore[reportReturnType]


class GenerateSampling(SamplingBody):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: int | None = Field(default=None, ge=0, le=1)
    skip_special_tokens: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = True


class GenerateBody(_Body):
    """The body of /inference/v1/generate: token ids in, token ids out."""

    token_ids: list[int] = Field(min_length=1)
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = True
    cache_salt: str | None = None
    priority: Off = None
