"""The configuration of `whet eval`. Given a run's configuration file, it uses that run's data, sampling and rewards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from whet.config.base import config, config_from_dict
from whet.config.data import Sources
from whet.config.enums import Mode
from whet.config.fields import Bool, Count, Float, Fn, Name, Number, Seconds, Seed, Size, Temperature, Text
from whet.config.loader import dump_tree, merge, parse_config_args
from whet.config.model import RoleConfig
from whet.config.positional_words import is_config_file
from whet.config.rewards import RewardFields, check_workers
from whet.config.rollout import RolloutConfig
from whet.config.run import SHORTHANDS, missing_inputs
from whet.config.run_sections import NEW_TOKENS, RunDataConfig, RunGRPOConfig, RunRolloutConfig
from whet.errors import ConfigError

__all__ = ["EVAL_SHORTHANDS", "EvalDataConfig", "EvalRolloutConfig", "EvalRunConfig", "check_eval", "load_eval"]

TRAINING_SECTIONS = ("actor", "algo", "critic", "offload_to_cpu", "reference", "teacher", "trainer")
"""Sections that only a run's configuration has: a file with one of them is a run's."""


@config
class EvalRolloutConfig(RolloutConfig):
    """How completions are sampled: as in a run, with the defaults of an evaluation.

    >>> EvalRolloutConfig(temperature=0.6, num_generations_eval=8).max_tokens_to_generate
    1024
    """

    max_tokens_to_generate: Count = 1024
    """Length limit of a completion in tokens, stop token included; less if the prompt leaves less of the context."""
    temperature: Temperature = 0.0
    """Sampling temperature, by which the logits are divided; 0.0 = greedy."""
    max_prompt_length: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Length limit of a prompt in tokens; on_long_prompt decides about longer ones. None = the model's context
    length."""
    seed: Seed | None = None
    """Seed of sampling; None = the key `seed`."""
    num_generations_eval: Size | None = None
    """Completions of each prompt; None = 1."""


@config
class EvalDataConfig:
    """The data set to evaluate on."""

    path: Sources | None = None
    """Hub name, folder, a json, jsonl, csv, parquet or arrow file, "file.py:function" or "package.module:function" that
    returns the rows; or a list of data sets: [{path, split, subset, limit}, ...]. None = the rows come from Python."""
    subset: Name | None = None
    """Configuration of a hub data set, e.g. main; None = its only one."""
    split: Name | None = None
    """Split to evaluate on; None = the only one, or the only one named test, validation, dev or similar."""
    eval_fraction: Float = 0.0
    """Evaluate on the rows that a run with this data.eval_fraction holds out. 0.0 = all rows."""
    eval_fraction_seed: Seed = 0
    """Seed that chose the rows of eval_fraction: that run's trainer.seed."""
    batch_size: Size = 64
    """Prompts that are completed and scored at a time, then saved in the folder. It does not change the results."""
    prompt_column: Name | None = None
    """Column with the prompt; None = the one of prompt, prompts, messages, question, conversations that exists."""
    source_column: Name | None = None
    """Column to group the results by; None = the one of source, data_source that exists."""
    apply_chat_template: Bool | Literal["auto"] = "auto"
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it. auto = as in
    training if the model is in a run's folder, else if its tokenizer has a chat template."""
    system_prompt: Text = ""
    """System prompt of every conversation. "" = none."""
    on_template_change: Literal["error", "accept"] = "error"
    """If the chat template changes the text of a prompt: "error" = refuse it, "accept" = use the changed text."""
    on_answered: Literal["error", "take_off", "continue"] = "error"
    """A conversation that ends with the assistant's turn: "error" = refuse it; "take_off" = remove that turn and use it
    as the column answer, unless the row has one; "continue" = let the model continue it."""
    limit: Count | None = None
    """Use only the first N rows; None = all."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must lie in [0, 1), got {self.eval_fraction!r}; 0.0 turns it off")
        if not isinstance(self.path, str) and any("weight" in s for s in self.path or () if isinstance(s, Mapping)):
            raise ConfigError("data takes no weights in an evaluation, which reads every row once; leave them out")


@config
class EvalRunConfig(RewardFields):
    """Everything that `whet eval` needs.

    >>> load_eval(["model=runs/a", "data=test.jsonl", "reward=boxed", "num_generations=8", "temperature=0.6"]).k
    """

    model: Name | None = None
    """Folder of a model, of a finished run or of a checkpoint (step-*), a hub name, or "file.py:function" that makes
    the model."""
    tokenizer: Name | None = None
    """Folder or hub name of the tokenizer; None = the model's."""
    trust_remote_code: Bool = False
    """Run the Python files in the folders of the weights and the tokenizer. Read them first: they run with your
    permissions."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; auto = the dtype of the run if the model is in a run's folder, else as in training: see
    actor.dtype."""
    device: Name | None = None
    """cpu, cuda, cuda:1 ...; None = the GPU if there is one."""
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)
    """Sampling."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The data set."""
    reward: Name | list[Name] | dict[Name, Float] | None = None
    """Reward functions: a built-in name, "file.py:function" or "package.module:function"; a list; or name -> weight.
    The name reward_model means the model of that section."""
    reward_model: RoleConfig | None = None
    """A reward model (transformers' sequence classifier with one label). Its score is another reward, with the weight
    1.0 unless `reward` has one for it. None = no reward model."""
    rollout_engine: Name = "embedded"
    """"embedded" = whet's own, "hf" = transformers' forward in a loop, "vllm", "sglang", "mock" (for tests),
    or "package.module:Class"."""
    seed: Seed = 0
    """Seed of sampling. Random numbers depend on it, on the prompt's place and on the number of the generation."""
    k: tuple[Count, ...] | None = None
    """The values of k in pass@k and majority@k; None = 1, 2, 4 ... and the number of completions of a prompt."""
    pass_reward: Name | None = None
    """Name of the reward function that decides if a completion passes; None = the weighted total."""
    pass_threshold: Float | None = None
    """A completion passes if its reward is at least this; None = 1.0 if all rewards are 0 or 1, else pass@k is left
    out."""
    answer_fn: Name | Fn | None = None
    """The answer that majority@k votes on: boxed, last_number, number_match, whole (the text without white space
    around it), "file.py:function" or "package.module:function". A function returns the answer of a completion's text,
    or None. None = the attribute `answer_fn` of the reward function (boxed, exact_match, last_number and number_match
    have one), else whole."""
    on_reward_error: Literal["raise", "none"] = "raise"
    """If a reward function fails: "raise" = end the evaluation; "none" = warn, and count it as not applicable for that
    batch."""
    reward_timeout_s: Seconds | None = 60.0
    """Longest time of one call of a reward function, in seconds; None = no limit."""
    reward_workers: Number = 0
    """Processes that call the reward functions. A process is killed if its call takes too long or crashes. 0 = call
    them in this process, which can't end a call."""
    out: Name | None = None
    """Folder of the results; None = evals/<date>-<time> for `whet eval`, and none from Python."""
    resume: Bool = False
    """Continue the evaluation in the folder `out`; completions that it has are not sampled again."""

    def __post_init__(self) -> None:
        """Checks rules that concern several sections."""
        self.check_rewards()
        if self.resume and self.out is None:
            raise ConfigError("resume=true needs out=<the folder of the evaluation>; set it")
        if self.reward_timeout_s is not None and self.reward_timeout_s <= 0:
            raise ConfigError(f"reward_timeout_s must be positive, got {self.reward_timeout_s!r}; None = no limit")
        check_workers(self.reward_workers)
        generations = self.sampling.num_generations_eval or 1
        if generations > 1 and self.sampling.temperature == 0 and not self.sampling.generation_kwargs:
            raise ConfigError(
                f"temperature=0.0 takes the likeliest token, so {generations} generations would all be the same; set a "
                "temperature above 0"
            )
        if self.k is not None and max(self.k, default=0) > generations:
            raise ConfigError(
                f"k={max(self.k)} needs as many completions of each prompt, and there are {generations}; set "
                f"num_generations={max(self.k)}"
            )
        if self.k is not None and not self.k:
            raise ConfigError("k is empty; give numbers, or leave it out")

    @property
    def sampling(self) -> EvalRolloutConfig:
        """The section rollout with the fields of its `eval` set."""
        return self.rollout.for_mode(Mode.EVAL)  # pyright: ignore[reportReturnType]


EVAL_SHORTHANDS: dict[str, str] = {
    "data": "data.path",
    "limit": "data.limit",
    "split": "data.split",
    "batch_size": "data.batch_size",
    "source_column": "data.source_column",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "num_generations": "rollout.num_generations_eval",
    "max_tokens": "rollout.max_tokens_to_generate",
    "max_tokens_to_generate": "rollout.max_tokens_to_generate",
    "max_prompt_length": "rollout.max_prompt_length",
}
"""Shorthand -> full key of an EvalRunConfig."""


def load_eval(argv: Sequence[str]) -> EvalRunConfig:
    """Returns an EvalRunConfig from `--config FILE key=value ...`.

    Args: argv: arguments of the command line after the command. A run's configuration file (a recipe, or config.yaml
        of a run folder) means that run's evaluation.
    Raises: ConfigError: every problem at once, a line each.
    """
    files: list[str] = []
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--config":
            files += [word, next(rest, "")]
        elif is_config_file(word):
            files += ["--config", word]
        elif word.startswith("--") and "=" not in word:
            words += [word, *itertools.islice(rest, 1)]
        elif word.startswith("--config="):
            files.append(word)
        else:
            words.append(word)
    settings = parse_config_args(files) if files else {}
    settings = (
        _settings_of_run(parse_config_args(files, SHORTHANDS))
        if settings.keys() & {*TRAINING_SECTIONS}
        else parse_config_args(files, EVAL_SHORTHANDS)
    )
    own = parse_config_args(words, EVAL_SHORTHANDS, EvalRunConfig)
    return config_from_dict(EvalRunConfig, merge(settings, own), short=EVAL_SHORTHANDS)


def _settings_of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the evaluation that a run of this configuration makes, as a tree: its data, sampling and rewards."""
    known = {f.name for f in dataclasses.fields(RunDataConfig)}  # data of a supervised run has other keys too
    data = config_from_dict(
        RunDataConfig, {name: value for name, value in (run.get("data") or {}).items() if name in known}
    )
    rollout = config_from_dict(RunRolloutConfig, run.get("rollout") or {})
    actor, algo, trainer = (run.get(name) or {} for name in ("actor", "algo", "trainer"))
    sampling = rollout.for_mode(Mode.EVAL)
    generations = 1 if sampling.temperature == 0 else algo.get("num_generations", RunGRPOConfig().num_generations)
    most = sampling.max_tokens_to_generate
    seed = trainer.get("seed", 0)
    same = ("subset", "prompt_column", "apply_chat_template", "system_prompt", "on_template_change", "on_answered")
    rows: dict[str, Any] = {name: getattr(data, name) for name in same}
    if data.eval_path is not None or data.eval_split is not None:
        rows |= {"path": data.eval_path or data.path, "split": data.eval_split}
    elif data.eval_fraction:
        rows |= {"path": data.path, "split": data.split, "limit": data.limit}
        rows |= {"eval_fraction": data.eval_fraction, "eval_fraction_seed": seed}
    settings = {
        "model": actor.get("model"),
        "dtype": actor.get("dtype", "auto"),
        "rollout": {
            **dump_tree(sampling),
            "max_tokens_to_generate": NEW_TOKENS if most is None else most,
            "num_generations_eval": sampling.num_generations_eval or generations,
        },
        "data": rows,
        "seed": seed,
        "reward": _with_weights(run.get("reward"), algo.get("reward_weights")) or _env_path_of_run(run, rollout),
    }
    kept = ("tokenizer", "reward_model", "rollout_engine")
    limits = {
        name: trainer[name] for name in ("on_reward_error", "reward_timeout_s", "reward_workers") if name in trainer
    }
    return {**settings, **{name: run[name] for name in kept if name in run}, **limits}


def _env_path_of_run(run: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """Returns the environment's reward, for a run without a reward, a reward model and a teacher; else None."""
    is_file = isinstance(rollout.env_path, str) and not rollout.has_environment_class
    if run.get("reward_model") is not None or run.get("teacher") is not None or not is_file:
        return None
    return f"{rollout.env_path}:reward_fn"


def _with_weights(reward: Any, weights: Sequence[float] | None) -> Any:
    """Returns the rewards of a run with their weights, which `algo` may have."""
    names = [reward] if isinstance(reward, str) else reward
    if weights is None or not isinstance(names, list):
        return reward
    if len(set(names)) != len(names) or len(names) != len(weights):
        raise ConfigError("algo.reward_weights don't fit `reward`; write reward as a mapping from name to weight")
    return dict(zip(names, weights, strict=True))


def check_eval(config: EvalRunConfig) -> None:
    """Raises ConfigError, with all problems, if a required key of an evaluation is missing.

    >>> check_eval(EvalRunConfig(model="m", reward="boxed"))
    Traceback (most recent call last):
    whet.errors.ConfigError: no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    """
    missing = []
    missing += missing_inputs(config.model, config.data.path, "<folder, run folder or hub name>")
    plays = config.sampling.has_environment_class or config.sampling.agent is not None
    if not config.reward_names and not plays:
        missing.append(
            "no reward; write reward=file.py:function, or one of whet's own, such as last_number (whet docs rewards)"
        )
    if config.reward_model is not None and config.reward_model.model is None:
        missing.append("reward_model has no model; write reward_model.model=<hub name or folder>")
    if missing:
        raise ConfigError("\n".join(missing))
