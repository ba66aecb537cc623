"""What `whet eval` takes. A run's configuration file stands for its evaluation: the same data, sampling, rewards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from whet.config.base import config, config_from_dict
from whet.config.enums import Mode
from whet.config.fields import Bool, Count, Float, Fn, Name, Number, Seconds, Seed, Size, Temperature, Text
from whet.config.length_aliases import length_shorthands
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
"""Sections that a run's configuration has and an evaluation's has not: a file with one of them is a run's."""


@config
class EvalRolloutConfig(RolloutConfig):
    """How completions are drawn: as in a run, with the defaults of an evaluation.

    >>> EvalRolloutConfig(temperature=0.6, num_generations_eval=8).max_tokens_to_generate
    1024
    """

    max_tokens_to_generate: Count = 1024
    """Longest completion in tokens, stop token included; less where a prompt leaves less room in the context."""
    temperature: Temperature = 0.0
    """Divides the logits; 0.0 = greedy."""
    max_prompt_length: Count | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Longest prompt in tokens; on_long_prompt decides about a longer one. None = what the model takes."""
    seed: Seed | None = None
    """Seed of the draws; None = the key `seed`."""
    num_generations_eval: Size | None = None
    """Completions of each prompt; None = 1."""


@config
class EvalDataConfig:
    """The data set to evaluate on."""

    path: Name | None = None
    """Hub name, folder, a json, jsonl, csv, parquet or arrow file, "file.py:function" or "package.module:function" that
    returns the rows; None = given from Python."""
    subset: Name | None = None
    """Configuration of a hub data set, e.g. main; None = its only one."""
    split: Name | None = None
    """Split to evaluate on; None = the only one, or the only one named test, validation, dev or the like."""
    eval_fraction: Float = 0.0
    """Evaluate on the rows that a run with this data.eval_fraction keeps from training. 0.0 = on all."""
    eval_fraction_seed: Seed = 0
    """By which they are chosen: that run's trainer.seed."""
    batch_size: Size = 64
    """Prompts that are completed and judged at a time, then kept in the folder. It changes no number."""
    prompt_column: Name | None = None
    """Column with the prompt; None = prompt, prompts, messages, question or conversations, whichever is there."""
    source_column: Name | None = None
    """Column by whose values the results are also given; None = source or data_source, where there is one."""
    apply_chat_template: Bool | Literal["auto"] = "auto"
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it. auto = as the
    model was trained, where it lies in a run's folder, else where its tokenizer has a chat template."""
    system_prompt: Text = ""
    """Put before every conversation. "" = off."""
    on_template_change: Literal["error", "accept"] = "error"
    """What to do where the chat template changes or leaves out what a prompt says: "error", or "accept" what it makes
    of it."""
    on_answered: Literal["error", "take_off", "continue"] = "error"
    """What to do with a conversation that ends with the assistant's turn: "error"; "take_off" = it is the row's answer:
    the column answer, unless there is one; "continue" = the model goes on with it."""
    limit: Count | None = None
    """Use only the first N rows; None = all."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must lie in [0, 1), got {self.eval_fraction!r}; 0.0 turns it off")


@config
class EvalRunConfig(RewardFields):
    """Everything that `whet eval` needs.

    >>> load_eval(["model=runs/a", "data=test.jsonl", "reward=boxed", "num_generations=8", "temperature=0.6"]).k
    """

    model: Name | None = None
    """Folder of a model, of a finished run or of a checkpoint (step-*), or a hub name."""
    tokenizer: Name | None = None
    """Folder or hub name of the tokenizer; None = the model's."""
    trust_remote_code: Bool = False
    """Run the Python files that lie beside the weights and the tokenizer. Read them first: they run with your
    permissions."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the model computes in; auto = as the run did in whose folder it lies, else as training would: see
    actor.dtype."""
    device: Name | None = None
    """cpu, cuda, cuda:1 ...; None = the GPU if there is one."""
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)
    """Sampling."""
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    """The data set."""
    reward: Name | list[Name] | dict[Name, Float] | None = None
    """Reward functions: a built-in name, "file.py:function" or "package.module:function"; a list; or name -> weight.
    The word reward_model among them stands for the model of that section."""
    reward_model: RoleConfig | None = None
    """A reward model (transformers' sequence classifier of one label), whose score is one more reward; of weight 1.0
    unless `reward` names it. None = none."""
    rollout_engine: Name = "embedded"
    """"embedded" = whet's own, "hf" = transformers' generate, "vllm", "sglang", "mock" (for tests),
    or "package.module:Class"."""
    seed: Seed = 0
    """Seed of the draws: with it a prompt's place and the generation make every random number."""
    k: tuple[Count, ...] | None = None
    """The k of pass@k and majority@k; None = 1, 2, 4 ... up to the completions of a prompt, and their number."""
    pass_reward: Name | None = None
    """The reward function that says whether a completion passes, by its name in the results; None = the weighted total.
    """
    pass_threshold: Float | None = None
    """A completion passes where its reward is at least this; None = 1.0 where all rewards are 0 or 1, else there is no
    pass@k."""
    answer_fn: Name | Fn | None = None
    """What majority@k votes on: boxed, last_number, number_match, whole (the text without white space around it),
    "file.py:function" or "package.module:function", from a completion's text to its answer, None where there is none.
    None = the answer that the reward function reads (its attribute `answer_fn`; boxed, exact_match, last_number and
    number_match have one), else whole."""
    on_reward_error: Literal["raise", "none"] = "raise"
    """A reward function that fails: end the evaluation, or count as not applicable (None) for that batch, with a
    warning."""
    reward_timeout_s: Seconds | None = 60.0
    """Longest time of one call of a reward function, in seconds; None = no limit."""
    reward_workers: Number = 0
    """Processes that call the reward functions, and that are killed where one takes too long or crashes; 0 = they are
    called in this process, which can end none."""
    out: Name | None = None
    """Folder of the results; None = evals/<date>-<time> for `whet eval`, and none from Python."""
    resume: Bool = False
    """Continue the evaluation that lies in `out`: what is completed there is not drawn again."""

    def __post_init__(self) -> None:
        """Checks what concerns several sections."""
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
    **length_shorthands("rollout.max_tokens_to_generate", "rollout.max_prompt_length"),
}
"""Shorthand -> full key of an EvalRunConfig."""


def load_eval(argv: Sequence[str]) -> EvalRunConfig:
    """An EvalRunConfig from `--config FILE key=value ...`.

    Args: argv: arguments of the command line after the command. A file that is a run's configuration (a recipe, or
        config.yaml of a run folder) stands for that run's evaluation.
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
    given = parse_config_args(files) if files else {}
    given = (
        _settings_of_run(parse_config_args(files, SHORTHANDS))
        if given.keys() & {*TRAINING_SECTIONS}
        else parse_config_args(files, EVAL_SHORTHANDS)
    )
    own = parse_config_args(words, EVAL_SHORTHANDS, EvalRunConfig)
    return config_from_dict(EvalRunConfig, merge(given, own), short=EVAL_SHORTHANDS)


def _settings_of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The evaluation that a run of this configuration makes, as a tree: its data, sampling and rewards."""
    known = {f.name for f in dataclasses.fields(RunDataConfig)}  # of supervised training it has other keys besides
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
    found = {
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
    return {**found, **{name: run[name] for name in kept if name in run}, **limits}


def _env_path_of_run(run: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """The reward of a run that names none: its environment's, if nothing else judges or teaches."""
    alone = run.get("reward_model") is None and run.get("teacher") is None and isinstance(rollout.env_path, str)
    return f"{rollout.env_path}:reward_fn" if alone else None


def _with_weights(reward: Any, weights: Sequence[float] | None) -> Any:
    """The rewards of a run with their weights, which may stand in `algo`."""
    names = [reward] if isinstance(reward, str) else reward
    if weights is None or not isinstance(names, list):
        return reward
    if len(set(names)) != len(names) or len(names) != len(weights):
        raise ConfigError("algo.reward_weights don't fit `reward`; write reward as a mapping from name to weight")
    return dict(zip(names, weights, strict=True))


def check_eval(config: EvalRunConfig) -> None:
    """Raises ConfigError, all at once, where an evaluation lacks what has no default.

    >>> check_eval(EvalRunConfig(model="m", reward="boxed"))
    Traceback (most recent call last):
    whet.errors.ConfigError: no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    """
    missing = []
    if config.sampling.max_turns > 1:
        missing.append(
            f"rollout.max_turns={config.sampling.max_turns}: whet eval completes prompts in one turn, and episodes are "
            "evaluated by their run (trainer.eval_every_n_steps); set rollout.max_turns=1 for the first turn alone"
        )
    missing += missing_inputs(config.model, config.data.path, "<folder, run folder or hub name>")
    if not config.reward_names:
        missing.append("no reward; write reward=file.py:function, or the name of one of whet's own")
    if config.reward_model is not None and config.reward_model.model is None:
        missing.append("reward_model has no model; write reward_model.model=<hub name or folder>")
    if missing:
        raise ConfigError("\n".join(missing))
