"""The configuration of sampling: the section rollout.

The subsections vllm and sglang (config/engines.py) configure the rollout_engine of that name; other engines warn that
they do not read them. An engine refuses a setting that it does not support.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
from dataclasses import field
from typing import Any, ClassVar, Literal

from whet.config.base import config, config_from_dict
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
    Seconds,
    Seed,
    Size,
    Strings,
    Temperature,
    Text,
    Tree,
)
from whet.config.synonyms import find_owner
from whet.errors import ConfigError, nearest
from whet.util.references import is_ref

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
"""Option of transformers' generate -> the field of RolloutConfig that does the same."""

AGENT_TURNS = 8
"""max_episode_tokens of an agent, in multiples of max_tokens_to_generate, where it is not set."""

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


@config
class ConstraintConfig:
    """Constrained decoding: give one of the fields.

    >>> ConstraintConfig(regex="[0-9]+").kind, ConstraintConfig(json_schema={"type": "integer"}).text
    ('regex', '{"type": "integer"}')
    >>> ConstraintConfig()
    Traceback (most recent call last):
    whet.errors.ConfigError: a constraint needs one of regex, json_schema, grammar; got none of them
    """

    regex: Text | None = None
    """Regular expression (Rust's syntax) that the whole completion must match."""
    json_schema: Tree | Text | None = None
    """JSON schema that the completion must obey; as a mapping, or as JSON text."""
    grammar: Text | None = None
    """Lark grammar that the completion must follow; its first rule is `start`."""

    def __post_init__(self) -> None:
        """Checks that exactly one field is given."""
        named = [f.name for f in dataclasses.fields(self) if vars(self)[f.name] is not None]
        if len(named) != 1:
            names = ", ".join(f.name for f in dataclasses.fields(self))
            raise ConfigError(f"a constraint needs one of {names}; got {' and '.join(named) or 'none of them'}")
        if self.json_schema is not None:
            _check_schema(self.json_schema)

    @property
    def kind(self) -> str:
        """The field that is given."""
        return next(f.name for f in dataclasses.fields(self) if vars(self)[f.name] is not None)

    @property
    def text(self) -> str:
        """The text of the constraint; a schema as JSON with its keys in the given order."""
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
    """How completions are sampled.

    >>> RolloutConfig(top_p=0.0)
    Traceback (most recent call last):
    whet.errors.ConfigError: top_p must lie in (0, 1], got 0.0; 1.0 turns it off
    >>> RolloutConfig(temperature=1.0, eval={"temperature": 0.0}).for_mode("eval").temperature
    0.0
    """

    max_tokens_to_generate: Count = 64
    """Length limit of a completion in tokens, stop token included."""
    temperature: Temperature = 0.9
    """Sampling temperature, by which the logits are divided; 0.0 = greedy."""
    top_p: Float | None = 1.0
    """Nucleus sampling: keep the smallest set of tokens with at least this total probability; 1.0 or None = off."""
    top_k: Int | None = None
    """Keep only the k most likely tokens; None or -1 = off."""
    seed: Seed | None = None
    """Seed of sampling; None = trainer.seed."""
    max_prompt_length: Count = 64
    """Length limit of a prompt in tokens; on_long_prompt decides about longer ones."""
    eos_tokens: tuple[Int, ...] | None = None
    """Token ids that end a completion and stay part of it; None = those of the model and the tokenizer."""

    min_p: Float = 0.0
    """Drop tokens with less than this share of the most likely token's probability. 0.0 = off."""
    repetition_penalty: Float = 1.0
    """Divide positive logits and multiply negative logits of tokens that prompt or completion already have. 1.0 =
    off."""
    min_tokens: Number = 0
    """Sample no stop token before this many tokens."""
    stop: Strings = ()
    """Strings that end a completion; the completion keeps the string. Give special tokens by id: eos_tokens."""
    forbidden_tokens: tuple[Int, ...] = ()
    """Token ids that are never sampled."""
    constraint: ConstraintConfig | None = None
    """Constrained (structured) decoding: regex, json_schema or grammar, e.g. {regex: "[0-9]+"}; None = any text. Needs
    the extra `grammar`."""
    logprobs_mode: Literal["processed", "full"] = "processed"
    """Distribution of all logprobs: "processed" = the one sampled from, with penalties and truncation; "full" = only
    the temperature."""
    on_long_prompt: Literal["error", "truncate_left", "drop"] = "error"
    """A prompt over max_prompt_length: "error" = refuse it, "truncate_left" = keep its last tokens, "drop" = leave the
    row out and log the number."""
    max_batch_size: Size = 256
    """Maximum number of completions that are decoded at the same time (vLLM: max_num_seqs)."""
    kv_cache_tokens: Count | None = None
    """Size of the KV cache in tokens of all completions; None = enough for max_batch_size of the longest."""
    native_kernels: Bool = True
    """On a CPU, run the embedded engine with kernels that this machine's C++ compiler builds once; false = with torch's
    operators. WHET_NATIVE=0 in the environment also turns the kernels of training off."""
    sync_check_every_n_syncs: Number = 1
    """Syncs of an engine with a copy of the weights per check: it draws 8 tokens, whose logprobs must be the trainer's;
    0 = no check."""
    num_generations_eval: Size | None = None
    """Completions of each evaluation prompt; None = algo.num_generations, or 1 if evaluation is greedy."""
    generation_kwargs: Tree = field(default_factory=dict)
    """Options of transformers' generate that whet has no field for, e.g. {no_repeat_ngram_size: 3} or {num_beams: 4}.
    With any of them the "hf" engine runs the rollout. Training supports them only with logprobs_mode "full", and
    does not support beams."""
    chat_template_kwargs: Tree = field(default_factory=dict)
    """More arguments of the chat template, e.g. {enable_thinking: false}."""
    env_path: Name | Fn | None = None
    """The environment, which answers the model's turns: a class ("env.py:Class") whose methods are the model's tools,
    with reset, step and get_reward; or a file ("env.py") or module with interact(messages), reward_fn(messages,
    answer) and TOOL (the tools that the chat template lists). From Python also the class or the function interact
    itself. A class's get_reward is added to the rewards; a reward_fn is the reward if `reward` is not set. None = no
    environment. See whet docs environments."""
    agent: Name | Fn | None = None
    """The agent, in place of an environment: "file.py:function" or "package.module:function", called as agent(base_url,
    api_key, row) for each episode. It calls the model at base_url by OpenAI's API, and returns its reward. None = no
    agent. See whet docs agents."""
    agent_timeout_s: Seconds | None = 600.0
    """Longest time of an agent, in seconds; None = no limit."""
    tool_timeout_s: Seconds | None = 30.0
    """Longest time of a tool's call in an environment's class, in seconds; the model gets a late one's error. None = no
    limit."""
    turn_timeout_s: Seconds | None = 60.0
    """Longest time in which an environment answers a turn, all tools included, and of its reset and get_reward each, in
    seconds; trainer.on_reward_error decides about a late one. None = no limit."""
    episode_timeout_s: Seconds | None = None
    """Longest time of an environment's episode, in seconds, the model's turns included; None = no limit."""
    on_infrastructure_failure: Literal["mask", "retry", "refill"] = "retry"
    """What follows if an episode of an environment or an agent fails by its infrastructure (a connection, a sandbox,
    the machine, InfrastructureError): "mask" = it has no reward and is not trained; "retry" = it is run again with
    the same random draws, at most max_retries times, and masked then; "refill" = its group is replaced by that of a
    further prompt (needs trainer.max_steps). Evaluations mask, or retry."""
    max_retries: Number = 2
    """Maximum number of times that an episode is run again."""
    max_failed_share: Float = 0.25
    """A run ends if more than this share of a step's episodes failed by their infrastructure; 1.0 = never."""
    max_turns: Count = 1
    """Maximum number of turns of the model in an episode. The environment answers between two turns; 1 = it never
    answers."""
    max_episode_tokens: Count | None = None
    """With max_turns above 1: the most tokens after the prompt, those of tools included. An episode also ends at the
    model's context length, and in training at trainer.max_tokens_per_microbatch. None = max_turns times
    max_tokens_to_generate. With an agent: max_prompt_length plus this is the most tokens of a call's context and
    completion, the agent's own system prompt and tools included; None = 8 times max_tokens_to_generate."""
    answers_dir: Name | None = None
    """Folder in which the answers of environments (file, function or class) and what agents do are recorded. An episode
    that it has is answered from there, as long as the model says the same: a run whose environment or agent does not
    repeat itself can then be resumed and repeated to the bit. None = answers are not recorded."""
    eval: Tree = field(default_factory=dict)
    """Other values of these fields for evaluation, e.g. {temperature: 0.0}."""

    vllm: VLLMOptions = field(default_factory=VLLMOptions)
    """Options of vLLM; only rollout_engine "vllm" reads them."""
    sglang: SGLangOptions = field(default_factory=SGLangOptions)
    """Options of SGLang; only rollout_engine "sglang" reads them."""

    OVERRIDES: ClassVar[tuple[str, ...]] = ("eval",)
    """Fields that hold a mapping of fields of this section."""

    REFUSED: ClassVar[dict[str, str]] = {
        "tensor_parallel_size": "the processes that divide matrices in training sample together too, with the embedded "
        "engine; set trainer.tensor_parallel_size",
    }

    def __post_init__(self) -> None:
        """Checks the ranges and the overrides of evaluation."""
        self._check_ranges()
        if self.eval:
            known = {f.name for f in dataclasses.fields(self)} - {"eval"}
            for name in self.eval:
                if name not in known:
                    own = find_owner(name, known)
                    near = f"; did you mean eval.{own}?" if own in known else nearest(name, known, "eval.")
                    raise ConfigError(f"eval.{name}: unknown key{near}")
                if name in ("on_infrastructure_failure", "max_retries", "max_failed_share"):
                    raise ConfigError(f"eval.{name} belongs to the whole run; set rollout.{name}")
                if name in ("kv_cache_tokens", "max_batch_size", "sglang", "sync_check_every_n_syncs", "vllm"):
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
        if self.agent is not None and (self.env_path is not None or self.max_turns > 1):
            other = "env_path" if self.env_path is not None else f"max_turns={self.max_turns}"
            raise ConfigError(f"agent and {other}: an agent decides itself what follows a turn; leave {other} out")
        if self.max_turns > 1 and self.env_path is None:
            raise ConfigError(
                f"max_turns={self.max_turns} needs env_path, the file whose interact(messages) answers between turns"
            )
        self._check_time_limits()
        if not 0 <= self.max_failed_share <= 1:
            raise ConfigError(f"max_failed_share must lie in [0, 1], got {self.max_failed_share!r}; 1.0 turns it off")
        if self.max_turns == 1 and self.agent is None and self.max_episode_tokens is not None:
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

    def _check_time_limits(self) -> None:
        """Raises ConfigError: a time limit is not positive, or not longer than the one that it contains."""
        for name in ("tool_timeout_s", "turn_timeout_s", "episode_timeout_s", "agent_timeout_s"):
            if (limit := getattr(self, name)) is not None and limit <= 0:
                raise ConfigError(f"{name} must be positive, got {limit!r}; None = no limit")
        nested = ["tool_timeout_s"] if self.has_environment_class else []
        nested += ["turn_timeout_s", "episode_timeout_s"]
        limits = [(name, value) for name in nested if (value := getattr(self, name)) is not None]
        for (inner, shorter), (outer, longer) in itertools.pairwise(limits):
            if shorter >= longer:
                default = " (the default)" if shorter == type(self).__dataclass_fields__[inner].default else ""
                raise ConfigError(
                    f"{inner}={shorter}{default} is not below {outer}={longer}, so it would never end a call; set it "
                    f"below {longer} too, or raise {outer}"
                )

    @property
    def has_environment_class(self) -> bool:
        """Whether env_path is a class, and not a file or a function.

        >>> [RolloutConfig(env_path=path).has_environment_class for path in ("env.py:Class", "env.py")]
        [True, False]
        """
        return isinstance(self.env_path, type) or (isinstance(self.env_path, str) and is_ref(self.env_path))

    @property
    def has_turns(self) -> bool:
        """Whether episodes have several turns, with an environment."""
        return self.max_turns > 1 or self.has_environment_class

    @property
    def most_tokens(self) -> int:
        """The most tokens that can follow a prompt: of its completion, or of all turns and what stands between them.

        >>> RolloutConfig(max_tokens_to_generate=8, env_path="env.py", max_turns=3).most_tokens
        24
        """
        turns = self.max_turns if self.agent is None else AGENT_TURNS
        return self.max_episode_tokens or turns * self.max_tokens_to_generate

    def for_mode(self, mode: Mode | str) -> RolloutConfig:
        """This section as training or evaluation uses it.

        Args: mode: Mode or its value.
        Returns: itself for training, else a copy with the fields of `eval` set.
        """
        if Mode(mode) is Mode.TRAIN or not self.eval:
            return self
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return config_from_dict(type(self), {**fields, **self.eval, "eval": {}})
