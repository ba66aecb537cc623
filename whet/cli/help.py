"""The text of `--help`: the keys that are set most often; `--help all` every key, `--help SECTION` those of a section.

It imports whet.config, and no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["command_help", "common_keys_lines", "find_help_topic"]

Group = tuple[str, Mapping[str, str]]
"""A title, and a line for each key."""

_MODEL: Group = ("Model", {"model": "model to train: a folder or a hub name"})
_ADAPTER = {
    "actor.lora.r": "rank of a LoRA adapter, e.g. 16; default: no adapter",
}
_OPTIM = {
    "actor.schedule": "learning-rate schedule: constant, linear, cosine, ...",
}
_DATA = {
    "data": "rows: json, jsonl, csv or parquet file, folder or hub name",
    "data.batch_size": "rows per step",
    "data.eval_path": "rows for evaluation",
    "data.eval_fraction": "share of `data` held out for evaluation",
    "data.system_prompt": "system prompt of conversations that have none",
}
_REWARD: Group = (
    "Reward",
    {
        "reward": "file.py:function, a built-in (exact_match), or a list [a, b]",
        "reward_model.model": "reward model; its score is added to the rewards",
    },
)
_LENGTHS = {
    "rollout.max_tokens_to_generate": "longest completion in tokens; default: 512, or what fits",
    "rollout.max_prompt_length": "longest prompt in tokens; default: the longest of the data",
}
_SAMPLING = {
    **_LENGTHS,
    "rollout.temperature": "sampling temperature; 1.0: the policy's own distribution",
    "rollout_engine": "vllm, sglang, hf; auto: vllm if it can run (whet docs engines)",
    "rollout.env_path": "env.py:Class, and rollout.max_turns=4 (whet docs environments)",
    "rollout.agent": "agent.py:agent: an agent as the episode (whet docs agents)",
}
_RUN = {
    "trainer.run_dir": "output folder; default: runs/<date>-<time>",
    "trainer.max_steps": "number of steps; default: as many as the data have",
    "trainer.eval_every_n_steps": "steps between evaluations; 0: only before and after training",
    "trainer.keep_best": "metric, e.g. accuracy: keep the best evaluation's checkpoint",
    "trainer.loggers": "[tensorboard], wandb, trackio, mlflow or swanlab",
    "trainer.resume": "latest: continue the run in run_dir; or a checkpoint",
    "trainer.seed": "random seed of the sampling and of the order of the data",
}
_RL_RUN: Group = (
    "Run",
    {
        "trainer.mini_batch_size": "prompts per optimizer step; default: all prompts of the step",
        **_RUN,
    },
)
_LR = {"actor.lr": "learning rate; default: 1e-6, or 1e-4 for an adapter"}
_SFT_LR = {"actor.lr": "learning rate; default: 2e-5, or 1e-4 for an adapter"}
_SFT_RUN: Group = ("Run", {"trainer.num_epochs": "passes over the data; default: 1", **_RUN})
_SFT_DATA = {**_DATA, "data.max_length": "longest row in tokens; default: as many as the model reads"}

COMMON_KEYS: Mapping[str, Sequence[Group]] = {
    "grpo": (
        (_MODEL[0], {**_MODEL[1], **_LR, **_OPTIM, **_ADAPTER}),
        ("Data", _DATA),
        _REWARD,
        ("Sampling", {"algo.num_generations": "completions per prompt", **_SAMPLING}),
        (
            "Algorithm",
            {
                "algo.preset": "a published method: dapo, dr_grpo, gspo (whet docs papers)",
                "algo.advantage_estimator": "advantages: drgrpo, rloo, scalerl, ... (whet docs algorithms)",
                "algo.policy_loss_fn": "policy loss: gspo-token, cispo, sapo, gmpo, ...",
                "algo.beta": "weight of the KL penalty; 0.0: no reference model is loaded",
                "algo.num_iterations": "times each rollout is trained on (verl: ppo_epochs)",
            },
        ),
        _RL_RUN,
    ),
    "ppo": (
        (
            _MODEL[0],
            {**_MODEL[1], **_LR, "critic.lr": "learning rate of the critic; default: 1e-6", **_OPTIM, **_ADAPTER},
        ),
        ("Data", _DATA),
        _REWARD,
        ("Sampling", {"algo.num_generations": "completions per prompt", **_SAMPLING}),
        (
            "Algorithm",
            {
                "algo.gae_lambda": "1: trust only the rewards; 0: trust the critic",
                "algo.beta": "weight of the KL penalty; 0.0: no reference model is loaded",
                "algo.num_iterations": "times each rollout is trained on (verl: ppo_epochs)",
                "algo.critic_warmup_steps": "first steps, in which only the critic is trained",
            },
        ),
        _RL_RUN,
    ),
    "sft": (
        (_MODEL[0], {**_MODEL[1], **_SFT_LR, **_OPTIM, **_ADAPTER}),
        (
            "Data",
            {**_SFT_DATA, "data.train_on": "assistant (its turns), last (its last turn), all (every token)"},
        ),
        _SFT_RUN,
    ),
    "rm": (
        (
            _MODEL[0],
            {
                **_MODEL[1],
                "reward_model.lr": "learning rate; default: 1e-4",
                "reward_model.schedule": _OPTIM["actor.schedule"],
                "reward_model.lora.r": _ADAPTER["actor.lora.r"],
            },
        ),
        ("Data", {**_SFT_DATA, "data.chosen_column": "column of the better answer; default: chosen"}),
        ("Objective", {"algo.center_rewards_coefficient": "weight of a penalty that keeps scores near 0, e.g. 0.01"}),
        _SFT_RUN,
    ),
    "dpo": (
        (
            _MODEL[0],
            {
                **_MODEL[1],
                **_LR,
                **_OPTIM,
                **_ADAPTER,
                "reference.model": "reference model; default: the model before training",
            },
        ),
        ("Data", {**_SFT_DATA, "data.chosen_column": "column of the better answer; default: chosen"}),
        (
            "Objective",
            {
                "algo.loss_type": "ipo, simpo, orpo, kto, ... (whet docs preference)",
                "algo.beta": "larger values keep the policy closer to the reference",
                "algo.label_smoothing": "probability that a preference is labelled the wrong way round",
            },
        ),
        _SFT_RUN,
    ),
    "eval": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "data type of the weights"}),
        (
            "Data",
            {
                "data": _DATA["data"],
                "data.split": "split of a hub data set; default: test, if there is one",
                "data.limit": "only the first N rows",
                "data.system_prompt": "system prompt of conversations that have none",
                "data.batch_size": "prompts per batch",
            },
        ),
        ("Reward", {**_REWARD[1], "pass_threshold": "a completion passes if its reward is at least this"}),
        (
            "Sampling",
            {
                "num_generations": "completions per prompt, for pass@k; default: 1",
                "temperature": "0.0: greedy",
                "max_tokens": "longest completion in tokens",
                "seed": "random seed of the sampling",
            },
        ),
        (
            "Results",
            {"out": "output folder; default: evals/<date>-<time>", "resume": "continue the evaluation in `out`"},
        ),
    ),
    "generate": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "data type of the weights"}),
        (
            "Prompts",
            {
                "prompt": "a text, may be given several times; -: read standard input",
                "prompts": "or a file of rows, a folder or a hub name",
                "limit": "only the first N prompts",
                "system_prompt": "system prompt of conversations that have none",
                "apply_chat_template": "plain text becomes a user turn; auto: if there is a template",
            },
        ),
        (
            "Sampling",
            {
                "num_generations": "completions per prompt",
                "max_tokens": "longest completion in tokens; default: 256",
                "temperature": "0: greedy; default: 0.7",
                "top_p": "nucleus sampling",
                "stop": "strings that end a completion",
                "constraint.regex": "form of the completions; also constraint.json_schema",
                "seed": "the same seed samples the same completions",
            },
        ),
        (
            "Output",
            {
                "out": ".jsonl file to write; default: the completions are printed",
                "overwrite": "replace the file if it exists",
            },
        ),
    ),
    "chat": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "data type of the weights"}),
        (
            "Sampling",
            {
                "system_prompt": "system prompt of the conversation",
                "max_tokens": "longest answer in tokens; default: 256",
                "temperature": "0: greedy",
                "top_p": "nucleus sampling",
                "chat_template_kwargs": "arguments of the chat template, e.g. {enable_thinking: true}",
                "seed": "the same seed samples the same completions",
            },
        ),
    ),
    "serve": (
        ("Model", {"model": "folder of a model or of a run, or a hub name", "dtype": "data type of the weights"}),
        (
            "Server",
            {
                "host": "address to listen at; any but loopback needs an API key",
                "port": "port to listen at; 0: a free one",
                "api_key": "key of the clients; default: WHET_API_KEY, else a random one",
                "served_model_name": "name of the model in requests; default: model as it is written",
                "max_batch_size": "sequences that are decoded together",
                "max_length": "longest prompt and completion together, in tokens",
            },
        ),
        (
            "Defaults of requests",
            {
                "max_tokens": "longest completion in tokens; default: what the context has left",
                "temperature": "0: greedy",
                "top_p": "nucleus sampling",
                "chat_template_kwargs": "arguments of the chat template, e.g. {enable_thinking: true}",
            },
        ),
    ),
    "push": (
        (
            "Keys",
            {
                "run": "folder of the run; `whet push FOLDER` is short for it",
                "repo": "user/name on the hub; default: the name of the folder",
                "which": "final, best, before_stop, or a checkpoint such as step-000100",
                "private": "false: everybody can see it",
                "dry_run": "print what would be uploaded, and upload nothing",
                "merged": "merge an adapter into its base model first",
                "license": "license on the model card; default: that of the base model",
                "evals": "folders of `whet eval` with results for the model card",
            },
        ),
    ),
    "report": (
        (
            "Keys",
            {
                "runs": "run folders; `whet report FOLDER ...` is short for it",
                "out": "folder of the report; default: report/ in the run folder",
                "max_mb": "megabytes of completions, about; beyond it some steps are left out",
            },
        ),
    ),
    "compare": (
        (
            "Keys",
            {
                "runs": "run folders; those that differ only in the seed share a column",
                "metrics": "names of metrics.jsonl, of evaluations as 'eval reward'",
                "last": "steps over which a metric of training is averaged",
                "html": "--html: write the tables as a page, too",
                "out": "file of the page; default: compare.html",
            },
        ),
    ),
    "watch": (
        (
            "Keys",
            {
                "runs": "run folders; `whet watch FOLDER ...` is short for it",
                "host": "address to listen at; any but loopback needs the token that is printed",
                "port": "port to listen at; 0: a free one",
                "demo": "--demo: open a small run, which is made first if runs/watch-demo is not there",
            },
        ),
    ),
    "plan": (
        (
            "Keys",
            {
                "model": "only its config is read",
                "memory_gb=24": "memory of the GPU; default: plans for 24, 40 and 80",
                "num_processes=8": "processes of torchrun, each with a GPU; default: 1",
                "actor.lora.r": "plan an adapter of this rank",
                "rollout.max_prompt_length": "default: 512 tokens",
                "rollout.max_tokens_to_generate": "default: 512 tokens",
                "trainer.max_tokens_per_microbatch": "default: the most that fits",
                "actor.gradient_checkpointing": "default: none, or full where that does not fit",
            },
        ),
    ),
    "data": (
        (
            "Keys",
            {
                "rows=3": "number of rows to print",
                "model": "model that has the tokenizer; no weights are loaded",
                "data": _DATA["data"],
                "data.prompt_column": "default: prompt, prompts, messages, question or conversations",
                "data.apply_chat_template": "auto: if the tokenizer has a template",
                "data.system_prompt": _DATA["data.system_prompt"],
                "data.limit": "only the first N rows",
                **_LENGTHS,
            },
        ),
    ),
    "demo": (
        (
            "Keys, with the values of the recipe",
            {
                "seed=0": "random seed of the sampling and of the order of the data",
                "trainer.run_dir=runs/demo": "output folder",
                "trainer.max_steps=150": "number of steps",
                "data.batch_size=32": "prompts per step",
                "algo.num_generations=8": "completions per prompt",
                "actor.lr=2.0e-4": "learning rate",
                "algo.preset=dapo": "a published method (whet docs papers)",
            },
        ),
    ),
}
"""Command -> the keys that are set most often."""

_EXAMPLES: Mapping[str, Sequence[str]] = {
    "grpo": ("whet grpo model=Qwen/Qwen3-0.6B data=train.jsonl reward=rewards.py:exact trainer.run_dir=runs/a",),
    "ppo": ("whet ppo model=Qwen/Qwen3-0.6B data=train.jsonl reward=rewards.py:exact critic.lr=1e-5",),
    "sft": ("whet sft model=Qwen/Qwen3-0.6B-Base data=chats.jsonl actor.lr=2e-5",),
    "rm": ("whet rm model=Qwen/Qwen3-0.6B data=pairs.jsonl reward_model.lr=1e-5",),
    "dpo": ("whet dpo model=Qwen/Qwen3-0.6B data=pairs.jsonl algo.loss_type=simpo",),
    "eval": (
        "whet eval model=runs/a data=test.jsonl reward=last_number",
        "whet eval --config runs/a/config.yaml model=runs/a num_generations=16 temperature=0.6",
    ),
    "generate": (
        "whet generate model=runs/a prompt='2*2+4*3='",
        "whet generate model=runs/a/final prompts=test.jsonl num_generations=4 out=completions.jsonl",
    ),
    "chat": ("whet chat model=Qwen/Qwen3-0.6B max_tokens=1000",),
    "serve": ("whet serve Qwen/Qwen3-0.6B", "WHET_API_KEY=... whet serve runs/a host=0.0.0.0 port=8080"),
    "push": ("whet push runs/a repo=me/sums which=best dry_run=true",),
    "report": ("whet report runs/a", "whet report runs/a runs/b out=compared"),
    "compare": ("whet compare runs/a runs/b metrics='[eval reward, kl]'", "whet compare runs/a runs/b --html"),
    "watch": ("whet watch runs/a", "whet watch --demo"),
    "plan": (
        "whet plan model=Qwen/Qwen3-0.6B rollout.max_tokens_to_generate=1024 memory_gb=24",
        "whet plan sft model=Qwen/Qwen3-0.6B data.max_length=2048",
    ),
    "data": (
        "whet data data=rows.jsonl model=FOLDER",
        "whet data sft data=chats.jsonl model=FOLDER rows=1",
    ),
    "demo": ("whet demo seed=1",),
}
_NOTES: Mapping[str, str] = {
    "eval": "--config runs/a/config.yaml takes the evaluation data, sampling and rewards of that run.",
    "chat": "In the chat: /reset, /set temperature=0.7, /quit; Ctrl-C stops an answer.",
    "data": "Its keys are those of the command that trains on the rows: `whet grpo`, or the one that is named.",
    "demo": "It takes every key of `whet grpo`: `whet grpo --help all`.",
}
_NO_FIELD = "algo.preset"
"""A key that sets other keys."""
_OTHERS = ("rollout.vllm.", "rollout.sglang.")
"""Keys that begin so are printed by `--help rollout.vllm`, and not by `--help all`."""


def find_help_topic(words: Sequence[str]) -> str | None:
    """Returns the word after --help; "" = none; None = there is no --help.

    >>> find_help_topic(["--help"]), find_help_topic(["--help", "all"]), find_help_topic(["model=m"])
    ('', 'all', None)
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word in ("-h", "--help"):
            return "" if "=" in following or following.startswith("-") else following
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def common_keys_lines(command: str, kind: type, short: Mapping[str, str]) -> list[str]:
    """Returns the lines of the keys that are set most often, with the defaults of the configuration class.

    Args: command: of whet. kind: its configuration class. short: its short keys.
    """
    groups = [
        (title, {key if "=" in key else f"{key}={_default(kind, key, short)}": text for key, text in keys.items()})
        for title, keys in COMMON_KEYS[command]
    ]
    width = max(len(key) for _, keys in groups for key in keys)
    lines = []
    for title, keys in groups:
        lines += [f"{title}:", *(f"  {key:{width}}  {text}" for key, text in keys.items())]
    return lines


def _default(kind: type, key: str, short: Mapping[str, str]) -> str:
    """Returns the default of a key; "..." for keys whose default says nothing."""
    from whet.config.loader import default_text

    return "..." if key.endswith(".lora.r") or key == _NO_FIELD else default_text(kind, key, short)


def command_help(command: str, about: str, topic: str, kind: type, short: Mapping[str, str], flags: str = "") -> str:
    """Returns the help of a command.

    Args:
        command: of whet.
        about: a line that says what it does.
        topic: "" = the keys that are set most often, "all" = every key, else a section or key.
        kind: its configuration class.
        short: its short keys.
        flags: its flags.
    Raises: ConfigError: it has no such section or key.
    """
    from whet.config import help_text
    from whet.errors import ConfigError, nearest

    if topic and topic != "all":
        sections = [f.name for f in dataclasses.fields(kind)]
        keys = help_text(kind, only=topic if topic in sections else short.get(topic, topic))  # `data` is both
        if not keys:
            near = nearest(topic, _sections(kind, short))
            raise ConfigError(
                f"--help {topic}: there is no such section or key{near}; the sections are {', '.join(sections)}"
            )
        return keys
    words = {
        "push": "[RUN] ",
        "serve": "[MODEL] ",
        "report": "[RUN ...] ",
        "watch": "[RUN ...] ",
        "compare": "[RUN ...] ",
        "data": "[grpo|ppo|sft|rm|dpo] [rows=N] ",
        "plan": "[grpo|ppo|sft|rm|dpo] [memory_gb=N] ",
    }.get(command, "")
    files = "" if command == "demo" else "[--config FILE ...] "
    usage = [f"usage: whet {command} {words}{files}{flags}[key=value ...]", "", about]
    note = [_NOTES[command]] if command in _NOTES else []
    examples = ["Examples:" if len(_EXAMPLES[command]) > 1 else "Example:", *(f"  {e}" for e in _EXAMPLES[command])]
    if topic == "all" and command != "demo":
        hidden = _OTHERS
        if command == "grpo":
            hidden += ("critic", "trainer.critic_optimizer")
            short = {key: full for key, full in short.items() if not full.startswith("critic")}
        keys = help_text(kind, short, hidden=hidden, only="data" if command == "data" else "")
        rest = ["", "Files are read first, in their order; then key=value, with or without leading dashes."]
        if "rollout" in _sections(kind, {}):
            rest += ["Keys of vLLM and SGLang: `--help rollout.vllm`, `--help rollout.sglang`; whet docs engines."]
        return "\n".join([*usage, *note, "", "Keys:", keys, *rest, *examples])
    more = []
    if command != "demo":
        more = [f"`...`: not set. `whet {command} --help all` prints every key"]
    if command in ("grpo", "ppo", "sft", "rm", "dpo"):
        more[0] += ", `--help trainer` those of a section"
        more += ["--print_config prints the configuration and exits; --profile profiles the second step."]
    if more:
        more[0] += "."
    return "\n".join([*usage, *note, "", *common_keys_lines(command, kind, short), *examples, *more])


def _sections(kind: type, short: Mapping[str, str]) -> list[str]:
    """Returns the words that --help takes: keys, and the sections that they are in."""
    from whet.config.introspection import leaves

    keys: list[Any] = [key for key, *_ in leaves(kind, optional=True)]
    return list(dict.fromkeys([*(k.rsplit(".", n)[0] for k in keys for n in range(k.count("."), -1, -1)), *short]))
