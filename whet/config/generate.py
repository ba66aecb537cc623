"""The configuration of `whet generate` and `whet chat`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import field
from typing import Literal, TypeVar

from whet.config.base import config, config_from_dict
from whet.config.fields import (
    Bool,
    Count,
    Float,
    Int,
    Name,
    Number,
    Seed,
    Size,
    Strings,
    Temperature,
    Text,
    Tree,
)
from whet.config.loader import parse_config_args
from whet.config.rollout import ConstraintConfig
from whet.errors import ConfigError

__all__ = ["SAMPLING_SHORTHANDS", "ChatConfig", "GenerateConfig", "SamplingConfig", "check_sampling", "load_sampling"]

SAMPLING_SHORTHANDS = {"max_tokens_to_generate": "max_tokens"}
"""Shorthand -> full key of `whet generate` and `whet chat`: the name that a run has for it."""


@config
class SamplingConfig:
    """A model, and how to sample from it."""

    model: Name | None = None
    """Folder of a model, of a finished run, of several runs (the newest that has finished) or of a checkpoint (step-*),
    a hub name, or "file.py:function" that makes the model."""
    tokenizer: Name | None = None
    """Folder or hub name of the tokenizer; None = the model's."""
    trust_remote_code: Bool = False
    """Run the Python files in the folders of the weights and the tokenizer. Read them first: they run with your
    permissions."""
    max_tokens: Count | None = None
    """Length limit of a completion in tokens, stop token included; None = 256, or less if the context has less left."""
    temperature: Temperature | None = None
    """Sampling temperature, by which the logits are divided; 0 = greedy. None = 0.7, or 0 for a beam search."""
    top_p: Float | None = None
    """Nucleus sampling: keep the smallest set of tokens with at least this total probability; None = off."""
    top_k: Int | None = None
    """Keep only the k most likely tokens; None = off."""
    min_p: Float = 0.0
    """Drop tokens with less than this share of the most likely token's probability. 0.0 = off."""
    repetition_penalty: Float = 1.0
    """Divide positive logits and multiply negative logits of tokens that prompt or completion already have. 1.0 =
    off."""
    min_tokens: Number = 0
    """Sample no stop token before this many tokens."""
    stop: Strings = ()
    """Strings that end a completion; the completion keeps the string. Give special tokens by id: eos_tokens."""
    eos_tokens: tuple[Int, ...] | None = None
    """Token ids that end a completion; None = those of the model and the tokenizer."""
    forbidden_tokens: tuple[Int, ...] = ()
    """Token ids that are never sampled."""
    seed: Seed | None = None
    """Seed of sampling: the same seed samples the same; None = another seed each time."""
    generation_kwargs: Tree = field(default_factory=dict)
    """Options of transformers' generate that have no key here, e.g. {no_repeat_ngram_size: 3}; they need the hf
    engine."""
    constraint: ConstraintConfig | None = None
    """Constrained (structured) decoding: regex, json_schema or grammar, e.g. constraint.regex='[0-9]+'; None = any
    text. Needs the extra `grammar`."""
    system_prompt: Text = ""
    """System prompt of every conversation. "" = none."""
    chat_template_kwargs: Tree = field(default_factory=dict)
    """More arguments of the chat template, e.g. {enable_thinking: true}."""
    rollout_engine: Name = "embedded"
    """"embedded" = whet's own, "hf" = transformers' forward in a loop, "vllm", "sglang", "mock" (for tests),
    or "package.module:Class"."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; auto = the dtype of the run if the model is in a run's folder, else as in training: see
    actor.dtype."""
    device: Name | None = None
    """cpu, cuda, cuda:1 ...; None = the GPU if there is one."""

    @property
    def uses_beams(self) -> bool:
        """Whether a beam search replaces sampling."""
        return self.generation_kwargs.get("num_beams", 1) != 1

    @property
    def effective_temperature(self) -> float:
        """The temperature, with its default.

        >>> GenerateConfig().effective_temperature, GenerateConfig(beam_size=4).effective_temperature
        (0.7, 0.0)
        """
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.uses_beams else 0.7


@config
class GenerateConfig(SamplingConfig):
    """Everything that `whet generate` needs.

    >>> load_sampling(GenerateConfig, ["model=m", "prompt=Add: 2+2="]).prompt
    ('Add: 2+2=',)
    """

    prompt: Strings = ()
    """A prompt, taken literally; may be given several times. "-" = read standard input."""
    prompts: Name | None = None
    """Data set of prompts: a json, jsonl, csv, parquet or arrow file, a folder, a hub name, "file.py:function"."""
    prompt_column: Name | None = None
    """Column with the prompt; None = the one of prompt, prompts, messages, question, conversations that exists."""
    split: Name = "train"
    """Split of the data set."""
    limit: Count | None = None
    """Use only the first N prompts; None = all."""
    apply_chat_template: Bool | Literal["auto"] = "auto"
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it. auto = as in
    training if the model is in a run's folder, else if its tokenizer has a chat template."""
    max_prompt_length: Count | None = None
    """Length limit of a prompt in tokens; None = the model's context length."""
    on_long_prompt: Literal["error", "truncate_left", "drop"] = "error"
    """A prompt over max_prompt_length: "error" = refuse it, "truncate_left" = keep its last tokens, "drop" = leave it
    out."""
    num_generations: Size = 1
    """Completions of each prompt."""
    beam_size: Size | None = None
    """Number of beams of a beam search, which replaces sampling and returns the best num_generations; None = sample."""
    out: Name | None = None
    """A .jsonl file to write instead of printing: prompt, completion, finish_reason, tokens, logprobs."""
    overwrite: Bool = False
    """Replace the file `out` if it exists."""
    batch_size: Size = 64
    """Completions generated at once. It does not change the results."""

    def __post_init__(self) -> None:
        """Checks rules that concern several keys."""
        if self.prompt and self.prompts is not None:
            raise ConfigError("prompt and prompts both give prompts; keep one")
        if self.uses_beams and self.temperature:
            raise ConfigError(
                f"temperature={self.temperature:g} has no meaning for a beam search, which draws nothing; leave it out"
            )

    @property
    def uses_beams(self) -> bool:
        """Whether a beam search replaces sampling."""
        return (self.beam_size or 1) > 1 or super().uses_beams


@config
class ChatConfig(SamplingConfig):
    """Everything that `whet chat` needs."""

    temperature: Temperature = 0.7
    """Sampling temperature, by which the logits are divided; 0 = greedy."""
    apply_chat_template: Bool | None = None
    """Put turns through the chat template; false = continue plain text. None = true if the tokenizer has a template."""


T = TypeVar("T", bound=SamplingConfig)


def load_sampling(cls: type[T], argv: Sequence[str]) -> T:
    """Returns the configuration of `whet generate` or `whet chat` from its arguments.

    Args: cls: GenerateConfig or ChatConfig. argv: `--config FILE`, `key=value`; a prompt= is taken as it stands, and
        each is one more.
    Raises: ConfigError: every problem at once, a line each.
    """
    prompts = tuple(word.removeprefix("--").partition("=")[2] for word in argv if _is_prompt(word))
    arguments = parse_config_args([word for word in argv if not _is_prompt(word)], SAMPLING_SHORTHANDS, cls)
    return config_from_dict(cls, {**arguments, **({"prompt": prompts} if prompts else {})}, short=SAMPLING_SHORTHANDS)


def _is_prompt(word: str) -> bool:
    return word.removeprefix("--").startswith("prompt=")


def check_sampling(config: SamplingConfig) -> None:
    """Raises ConfigError if no model is given, or if standard input is needed and closed.

    >>> check_sampling(ChatConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write model=<folder, run folder or hub name>
    """
    if config.model is None:
        raise ConfigError("no model; write model=<folder, run folder or hub name>")
    if sys.stdin is not None:
        return
    if isinstance(config, ChatConfig):
        raise ConfigError("a chat reads standard input, which is closed; run it in a terminal, or pipe lines in")
    if isinstance(config, GenerateConfig) and config.prompts is None and "-" in config.prompt:
        raise ConfigError("prompt=- reads standard input, which is closed; pipe a prompt in, or write prompt=TEXT")
