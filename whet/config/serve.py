"""The configuration of `whet serve`."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.base import config, config_from_dict
from whet.config.fields import Count, Name, Number, Size, Temperature, Text
from whet.config.generate import SAMPLING_SHORTHANDS, SamplingConfig
from whet.config.loader import parse_config_args
from whet.errors import ConfigError

__all__ = ["ServeConfig", "check_serve", "load_serve"]


@config
class ServeConfig(SamplingConfig):
    """Everything that `whet serve` needs. The sampling keys are the defaults of requests that don't set them.

    >>> load_serve(["runs/a", "port=0"]).model
    'runs/a'
    """

    host: Name = "127.0.0.1"
    """Address to listen at. On any other than loopback, an API key is required."""
    port: Number = 8000
    """Port to listen at; 0 = a free one."""
    api_key: Text | None = None
    """The key that requests bring as `Authorization: Bearer KEY`; None = the environment variable WHET_API_KEY, else a
    random key, which is printed; "" = no key, on loopback only."""
    served_model_name: Name | None = None
    """Name of the model in requests and responses; None = `model` as it is written."""
    temperature: Temperature = 1.0
    """Sampling temperature, by which the logits are divided; 0 = greedy."""
    max_tokens: Count | None = None
    """Length limit of a completion in tokens, stop token included; None = what the context has left."""
    max_length: Count | None = None
    """Length limit of a prompt and its completion together, in tokens; None = the model's context length."""
    max_batch_size: Size = 64
    """Sequences that are decoded together; more requests wait."""
    kv_cache_tokens: Count | None = None
    """Limit of the KV cache in tokens, padding included; None = as much as max_batch_size sequences need."""


def load_serve(argv: Sequence[str]) -> ServeConfig:
    """Returns a ServeConfig from command-line arguments. The first may be the model.

    Raises: ConfigError: every problem at once, a line each.
    """
    words = list(argv)
    model = words.pop(0) if words and "=" not in words[0] and not words[0].startswith("--") else None
    values = parse_config_args(words, SAMPLING_SHORTHANDS, ServeConfig)
    if model is not None and "model" in values:
        raise ConfigError(f"model={values['model']} and the word {model} both name a model; give one of them")
    return config_from_dict(
        ServeConfig, values if model is None else {"model": model, **values}, short=SAMPLING_SHORTHANDS
    )


def check_serve(config: ServeConfig) -> None:
    """Raises ConfigError if no model is given, or for a key that has no effect here.

    >>> check_serve(ServeConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write whet serve MODEL, where MODEL is a folder, a run folder or a hub name
    """
    if config.model is None:
        raise ConfigError("no model; write whet serve MODEL, where MODEL is a folder, a run folder or a hub name")
    if not 0 <= config.port < 65536:
        raise ConfigError(f"port={config.port}: expected 0 to 65535")
    if config.generation_kwargs:
        raise ConfigError(
            "generation_kwargs: whet serve batches requests in one engine, which does not take them; leave them out"
        )
    if config.seed is not None:
        raise ConfigError(f"seed={config.seed}: each request of whet serve has a seed of its own; leave it out")
