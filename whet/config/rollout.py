"""The configuration of sampling: the section rollout.

The subsections vllm and sglang (config/engines.py) configure the rollout_engine of that name; another engine warns that
it does not read them. An engine refuses a setting that it cannot carry out.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from whet.config.base import check, config
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.config.enums import Mode
from whet.config.fields import (
    Bool,
    Count,
    Float,
    Fn,
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
from whet.config.length_aliases import with_own_name
from whet.config.synonyms import owner
from whet.errors import ConfigError, nearest

__all__ = ["OWN_FIELDS", "ConstraintConfig", "RolloutConfig"]

OWN_FIELDS = {
    **{name: name for name in ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")},
    **dict.fromkeys(("max_length", "max_new_tokens"), "max_tokens_to_generate"),
    **dict.fromkeys(("min_length", "min_new_tokens"), "min_tokens"),
    "do_sample": "temperature (0.0 = greedy)",
    "eos_token_id": "eos_tokens",
    "num_return_sequences": "algo.num_generations",
    "stop_strings": "stop",
    "suppress_tokens": "forbidden_tokens",
}
"""Options of transformers' generate -> the field that stands for it here."""

_WORDS = """
$anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary
additionalItems additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema default
definitions dependencies dependentRequired dependentSchemas deprecated description discriminator else enum example
examples exclusiveMaximum exclusiveMinimum externalDocs format id if items maxContains maxItems maxLength
maxProperties maximum minContains minItems minLength minProperties minimum multipleOf not nullable oneOf pattern
patternProperties prefixItems properties propertyNames readOnly required then title type unevaluatedItems
unevaluatedProperties uniqueItems writeOnly xml
"""
SCHEMA_WORDS = frozenset(_WORDS.split())
"""Keywords of JSON schema, of all its drafts, and OpenAPI's annotations."""

LENGTH = "max_tokens_to_generate"
"""The name of the longest completion here; its others are read too."""


@config
class ConstraintConfig:
    """The language that completions lie in: give one of the fields.

    >>> ConstraintConfig(regex="[0-9]+").kind, ConstraintConfig(json_schema={"type": "integer"}).text
    ('regex', '{"type": "integer"}')
    >>> ConstraintConfig()
    Traceback (most recent call last):
    whet.errors.ConfigError: a constraint needs one of regex, json_schema, grammar; got none of them
    """

    regex: Text | None = None
    """Regular expression (Rust's syntax) that the whole completion matches."""
    json_schema: Tree | Text | None = None
    """JSON schema that the completion obeys; as a tree, or as JSON text."""
    grammar: Text | None = None
    """Lark grammar that the completion follows; its first rule is `start`."""

    def __post_init__(self) -> None:
        """Checks that exactly one field is given."""
        given = [f.name for f in dataclasses.fields(self) if vars(self)[f.name] is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in dataclasses.fields(self))
            raise ConfigError(f"a constraint needs one of {names}; got {' and '.join(given) or 'none of them'}")
        if self.json_schema is not None:
            _check_schema(self.json_schema)

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(f.name for f in dataclasses.fields(self) if vars(self)[f.name] is not None)

    @property
    def text(self) -> str:
        """What it holds; a schema as JSON, its keys in the order given."""
        value = vars(self)[self.kind]
        return value if isinstance(value, str) else json.dumps(value)


def _check_schema(schema: Any) -> None:
    """Raises ConfigError for a misspelt keyword: JSON schema ignores keywords that it doesn't define.

    Text that is not JSON is left to the compiler of the schema.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        near = difflib.get_close_matches(str(key), SCHEMA_WORDS, 1, 0.75)
        if key not in SCHEMA_WORDS and near:
            raise ConfigError(f"json_schema: unknown keyword {key!r}; did you mean {near[0]}? It would be ignored")
        if key in ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"):
            inside = list(value.values()) if isinstance(value, dict) else []
        elif key in ("const", "default", "discriminator", "enum", "example", "examples", "externalDocs", "xml"):
            inside = []  # data, and not a schema
        else:
            inside = value if isinstance(value, list) else [value]
        for part in inside:
            if isinstance(part, dict):
                _check_schema(part)


@config
class RolloutConfig:
    """How completions are drawn.

    >>> RolloutConfig(top_p=0.0)
    Traceback (most recent call last):
    whet.errors.ConfigError: top_p must lie in (0, 1], got 0.0; 1.0 turns it off
    >>> RolloutConfig(temperature=1.0, eval={"temperature": 0.0}).for_mode("eval").temperature
    0.0
    """

    max_tokens_to_generate: Count = 64
    """Longest completion in tokens, stop token included."""
    temperature: Temperature = 0.9
    """Divides the logits; 0.0 = greedy."""
    top_p: Float | None = 1.0
    """Nucleus sampling: keep the smallest set of tokens whose total probability reaches this; 1.0 or None = off."""
    top_k: Int | None = None
    """Keep only the k most likely tokens; None or -1 = off."""
    seed: Seed | None = None
    """Seed of the draws; None = the run's (trainer.seed)."""
    max_prompt_length: Count = 64
    """Longest prompt in tokens; on_long_prompt decides about a longer one."""
    eos_tokens: tuple[Int, ...] | None = None
    """Ids that end a completion and are part of it; None = the model's and the tokenizer's."""

    min_p: Float = 0.0
    """Drop tokens less likely than this share of the likeliest. 0.0 = off."""
    repetition_penalty: Float = 1.0
    """Divides positive and multiplies negative logits of tokens already there, the prompt's included. 1.0 = off."""
    min_tokens: Number = 0
    """No stop token is drawn before this many tokens."""
    stop: Strings = ()
    """Strings that end a completion; the text up to and with the string stays. Special tokens go by id: eos_tokens."""
    forbidden_tokens: tuple[Int, ...] = ()
    """Ids that are never drawn."""
    constraint: ConstraintConfig | None = None
    """Constrained (structured) decoding: regex, json_schema or grammar, e.g. {regex: "[0-9]+"}; None = any text. Needs
    the extra `grammar`."""
    logprob_support: Literal["sampling", "full"] = "sampling"
    """Distribution of all logprobs: "sampling" = the penalised, truncated one drawn from; "full" = temperature only."""
    on_long_prompt: Literal["error", "truncate_left", "drop"] = "error"
    """A prompt over max_prompt_length: refuse it, keep its last tokens, or leave the row out (counted, logged)."""
    max_batch_size: Size = 256
    """Completions decoded together."""
    kv_cache_tokens: Count | None = None
    """Tokens that the KV cache holds over all completions; None = what max_batch_size of the longest need."""
    native_kernels: Bool = True
    """On a CPU, the embedded engine runs on kernels that this machine's C++ compiler builds once; false = on torch's.
    It does not affect the kernels of training: WHET_NATIVE=0 in the environment turns all off."""
    num_generations_eval: Size | None = None
    """Completions of each evaluation prompt; None = algo.num_generations, or 1 where evaluation is greedy."""
    generation_kwargs: Tree = field(default_factory=dict)
    """Options of transformers' generate that whet has no field for, e.g. {no_repeat_ngram_size: 3} or {num_beams: 4}.
    With any of them the "hf" engine runs the rollout; training supports them under logprob_support "full" only, and
    never beams."""
    chat_template_kwargs: Tree = field(default_factory=dict)
    """Further arguments of the chat template, e.g. {enable_thinking: false}."""
    env_path: Name | Fn | None = None
    """What answers a turn: a file ("env.py") or module with interact(messages), reward_fn(messages, answer) and TOOL,
    the tools that the chat template tells of; from Python also the function interact itself. Its reward_fn is the
    reward where none is given. None = nothing answers. See whet docs environments."""
    max_turns: Count = 1
    """Turns of the model in an episode; between two of them interact is called. 1 = it never is."""
    max_episode_tokens: Count | None = None
    """With max_turns above 1: the most tokens after the prompt, those of tools included. An episode ends there, at the
    model's positions, and in training where it fills trainer.max_tokens_per_microbatch; None = max_turns times
    max_tokens_to_generate."""
    eval: Tree = field(default_factory=dict)
    """Fields of this section that differ in evaluation, e.g. {temperature: 0.0}."""

    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    """How vLLM is built; read by rollout_engine "vllm" alone."""
    sglang: SGLangOptions = field(default_factory=SGLangOptions)
    """How SGLang is built; read by rollout_engine "sglang" alone."""

    OVERRIDES: ClassVar[tuple[str, ...]] = ("eval",)
    """Mappings whose keys are this section's own fields."""

    REFUSED: ClassVar[dict[str, str]] = {
        "tensor_parallel_size": "this release runs an engine on one device",
    }

    @model_validator(mode="before")
    @classmethod
    def _length_names(cls, given: Any) -> Any:
        """Reads every name of the completions' length, in `eval` too."""
        given = with_own_name(given, LENGTH)
        values = given.kwargs if isinstance(given, ArgsKwargs) else given
        if not isinstance(values, Mapping) or "eval" not in values:
            return given
        values = {**values, "eval": with_own_name(values["eval"], LENGTH)}
        return ArgsKwargs((), values) if isinstance(given, ArgsKwargs) else values

    def __post_init__(self) -> None:
        """Checks the ranges and the overrides of evaluation."""
        self._check_ranges()
        if self.eval:
            known = {f.name for f in dataclasses.fields(self)} - {"eval"}
            for name in self.eval:
                if name not in known:
                    own = owner(name, known)
                    near = f"; did you mean eval.{own}?" if own in known else nearest(name, known, "eval.")
                    raise ConfigError(f"eval.{name}: unknown key{near}")
                if name in ("kv_cache_tokens", "max_batch_size", "sglang", "vllm"):
                    raise ConfigError(f"eval.{name} belongs to the engine, which evaluation shares; set rollout.{name}")
            try:
                self.for_mode(Mode.EVAL)
            except ConfigError as error:
                raise ConfigError("\n".join(f"eval.{line}" for line in str(error).splitlines())) from None

    def _check_ranges(self) -> None:
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p!r}; 1.0 turns it off")
        if self.top_k is not None and self.top_k < 1 and self.top_k not in (-1, 0):
            raise ConfigError(f"top_k must be positive, got {self.top_k!r}; None turns it off")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"min_p must lie in [0, 1), got {self.min_p!r}; 0.0 turns it off")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"repetition_penalty must be positive, got {self.repetition_penalty!r}; 1.0 turns it off")
        most: int | None = self.max_tokens_to_generate  # a run's may be settled later
        if most is not None and not 0 <= self.min_tokens <= most:
            raise ConfigError(f"min_tokens must lie in 0..max_tokens_to_generate={most}, got {self.min_tokens}")
        if taken := sorted(self.generation_kwargs.keys() & OWN_FIELDS.keys()):
            raise ConfigError(f"generation_kwargs: {taken[0]} has a field of its own: set {OWN_FIELDS[taken[0]]}")
        if self.max_turns > 1 and self.env_path is None:
            raise ConfigError(
                f"max_turns={self.max_turns} needs env_path, the file whose interact(messages) answers between turns"
            )
        if self.max_turns == 1 and self.max_episode_tokens is not None:
            raise ConfigError(
                f"max_episode_tokens={self.max_episode_tokens} has no effect with max_turns=1; set "
                "max_tokens_to_generate"
            )
        if self.max_episode_tokens is not None and most is not None and self.max_episode_tokens < most:
            raise ConfigError(
                f"max_episode_tokens={self.max_episode_tokens} is less than max_tokens_to_generate="
                f"{self.max_tokens_to_generate}, the tokens of one turn; raise it, or lower that"
            )
        if "" in self.stop:
            raise ConfigError("stop holds an empty string, which would end every completion at once; leave it out")

    @property
    def most_tokens(self) -> int:
        """The most tokens that can follow a prompt: of its completion, or of all turns and what stands between them.

        >>> RolloutConfig(max_tokens_to_generate=8, env_path="env.py", max_turns=3).most_tokens
        24
        """
        return self.max_episode_tokens or self.max_turns * self.max_tokens_to_generate

    def for_mode(self, mode: Mode | str) -> RolloutConfig:
        """This section as training or evaluation uses it.

        Args: mode: Mode or its value.
        Returns: itself for training, else a copy with the fields of `eval` set.
        """
        if Mode(mode) is Mode.TRAIN or not self.eval:
            return self
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return check(type(self), {**fields, **self.eval, "eval": {}})
