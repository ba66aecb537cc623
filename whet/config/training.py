"""The configuration of the training loop (the section trainer) and of a cluster.

Batch sizes count prompts. The completions of one prompt stay together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from pydantic import InstanceOf, field_validator, model_validator
from pydantic_core import ArgsKwargs

from whet.config.base import config
from whet.config.enums import Mode
from whet.config.fields import (
    Bool,
    Count,
    Float,
    Fn,
    Items,
    Name,
    Number,
    Seconds,
    Seed,
    Size,
    Text,
    Tree,
)
from whet.config.model import OptimConfig
from whet.config.monitoring import Band, KeepBestOptions
from whet.config.rewards import check_workers
from whet.config.rollout import RolloutConfig
from whet.errors import ConfigError

__all__ = [
    "CheckpointingOptions",
    "ClusterConfig",
    "MetricsLoggerOptions",
    "PerfMetricsOptions",
    "ProfilerOptions",
    "RLTrainingConfig",
    "SupervisedTrainingConfig",
    "TrainingConfig",
]


@config
class CheckpointingOptions:
    """When checkpoints are saved and how many are kept."""

    save_interval_steps: Count | None = None
    """Steps between two saves; None = save by time."""
    save_interval_s: Seconds = 180.0
    """Seconds between two saves; read only if save_interval_steps is None."""
    max_to_keep: Count | None = 3
    """Number of checkpoints to keep, the newest; None = keep all."""
    sharded: Bool = False
    """Every process writes and reads its own shards of weights and moments; false = rank 0 writes whole tensors."""
    enable_async_checkpointing: Bool = False
    """Write sharded checkpoints while the next steps run, from a copy of the shards in the memory of the host."""


@config
class MetricsLoggerOptions:
    """Loggers that receive the metrics in addition to the run folder."""

    log_dir: Name | None = None
    """Folder of the loggers' files; None = the run folder. Setting it without trainer.loggers turns TensorBoard on."""
    project_name: Name = "whet"
    """Project in Weights & Biases, trackio or SwanLab; experiment in MLflow."""
    run_name: Text = ""
    """Name of the run there; "" = the run folder's."""
    flush_every_n_steps: Count = 100
    """Steps between two flushes of a logger that buffers."""
    completions_every_n_steps: Number = 10
    """Steps between two tables of completions, for loggers that take them (all by name but jsonl). Every evaluation
    sends one too. 0 = none."""
    backend_kwargs: Tree = field(default_factory=dict)
    """More arguments for each logger: {wandb: {mode: offline}, mlflow: {tracking_uri: ...}, trackio: {...}}."""


@config
class PerfMetricsOptions:
    """Timing of the phases of a step."""

    enable_trace_writer: Bool = True
    """Write trace.json, which Perfetto or chrome://tracing opens."""
    trace_dir: Name | None = None
    """Folder of trace.json; None = the run folder."""


@config
class ProfilerOptions:
    """The steps to profile, and the folder of the profile; see whet docs performance."""

    log_dir: Name | None = None
    """Folder of profile-step-000002.json.gz (a timeline) and .txt (a table); None = the run folder."""
    skip_first_n_steps: Number = 1
    """Steps to skip before the first profiled step, counted from the start of this process, also in a resumed run."""
    profiler_steps: Count = 1
    """Steps to profile; each writes a pair of files."""


@config
class TrainingConfig:
    """The fields of every training loop.

    >>> TrainingConfig(keep_best="accuracy").keep_best.metric
    'accuracy'
    """

    eval_every_n_steps: Number = 0
    """Steps between two evaluations. The run also evaluates before the first step and after the last; 0 = only then."""
    max_steps: Count | None = None
    """Steps of the run, one rollout each; None = until the data ends."""
    checkpoint_root_directory: Name | None = None
    """Folder of the checkpoints; None = the run folder's checkpoints/."""
    checkpointing_options: CheckpointingOptions | None = None
    """When to save checkpoints; None = the defaults."""
    metrics_logging_options: MetricsLoggerOptions | None = None
    """Where metrics go; None = the defaults."""
    profile: Bool = False
    """Profile a step: write a timeline and a table of the most expensive operations by phase. `--profile` does the
    same."""
    profiler_options: ProfilerOptions | None = None
    """Which steps to profile; None = the second step if profile is true, else none."""
    perf_metrics_options: PerfMetricsOptions | None = None
    """Timing of the phases; None = the defaults without trace.json."""
    metrics_prefix: Text = ""
    """Prefix of every metric in the loggers, joined with a slash. "" = none."""
    pbar_description: Text | None = "Training"
    """Text before the progress, "" = none; None = no progress."""
    view: Literal["auto", "rich", "notebook", "lines"] = "auto"
    """Progress: "rich" = step, phase, metrics with their curves, memory and time left, updated in place; "notebook" =
    these as a table below the cell; "lines" = a line at most every 30 seconds; "auto" = rich if stderr is a terminal,
    notebook in a Jupyter kernel, else lines."""
    max_tokens_per_microbatch: Count | None = None
    """Maximum number of tokens of one forward and backward pass, prompts and completions together. None = on a GPU
    the most that fits by the plan of its memory, at most 16384; on a CPU about 1536, and up to 2048 to keep groups
    whole; more if the rollout's longest sequence is longer."""
    max_segments_per_packed_row: Size | None = None
    """Maximum number of sequences of one micro-batch; None = as many as the token budget allows."""

    num_epochs: Count | None = None
    """Epochs (passes over the data); None = one, or as many as max_steps needs."""
    seed: Seed = 0
    """Seed of the run. Every random draw depends on it."""
    data_shuffle_seed: Seed | None = None
    """Seed of the order of the data; None = the field seed."""
    run_dir: Name | None = None
    """Run folder. None: `whet grpo` makes runs/<date>-<time>; from Python none is written."""
    loggers: Items = ()
    """Names (tensorboard, wandb, trackio, mlflow, swanlab, package.module:name) or objects with log(step, values) and
    close()."""
    hub_model_id: Name | None = None
    """Hub repository to which the run sends the model, e.g. me/my-model; None = do not send it. `whet push` sends a
    finished run."""
    hub_strategy: Literal["end", "every_save"] = "end"
    """What to send to hub_model_id: "end" = the final model, "every_save" = also the model of each checkpoint."""
    hub_private_repo: Bool = True
    """Make the repository of hub_model_id private."""
    merge_adapter: Bool = False
    """Merge the adapter into the base and write final/ as a whole model, instead of an adapter in PEFT's format. No
    effect without an adapter."""
    final_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights in final/; auto = the dtype of the files that the model was loaded from, and float32 for an
    adapter. The trained weights and the checkpoints are float32 in any case."""
    resume: Name | None = None
    """"latest" = resume in run_dir where it stopped, a path = from that checkpoint; None = start a new run."""
    allow_config_change: Bool = False
    """Let a resumed run differ in its configuration; the differences are logged."""
    keep_best: KeepBestOptions | None = None
    """Keep the checkpoint with the best value of an evaluation metric, in addition to max_to_keep: keep_best=accuracy,
    or keep_best.metric=loss keep_best.mode=min. None = off."""
    stop_when: dict[Name, Band] | None = None
    """Stop when a metric leaves a band, and keep the checkpoint before that: stop_when.entropy.below=0.05
    stop_when.entropy.steps=3. eval/<name> is a metric of evaluations. None = off."""
    collective_timeout_s: Seconds = 1800.0
    """Longest time that a process waits for the others under torchrun, in seconds; then the run ends with an error.
    At least 1, and more than the longest time for which one rank rewards or saves while the others wait."""

    context_parallel_size: Count = 1
    """Processes that divide the tokens of each forward and backward pass, so each keeps a part of the activations
    (Ulysses). It must divide the number of processes and of attention heads. 1 = each pass runs on one process."""
    tensor_parallel_size: Count = 1
    """Processes that divide the matrices of each layer, and run each forward and backward pass together. It must divide
    the number of processes and of attention heads, and divide the number of KV heads or be a multiple of it. 1 = each
    process has whole layers while they run."""
    rehearse: Bool | None = None
    """Before the first step run the largest micro-batch of an update, and allocate the cache of a rollout, next to the
    memory that the optimizer will take, so that a run that does not fit ends before it begins. None = on a GPU."""
    sync_each_microbatch: Bool = False
    """Of several processes: add gradients over the processes after each forward and backward pass, not after the last
    of an update. Each then holds its shard of the gradient, not all of it, and sends as much more."""
    data_parallel_replicate_size: Count = 1
    """Copies of the model, each sharded over the processes of one group: HSDP, for clusters whose hosts are connected
    more slowly than the GPUs within them; set it to the number of hosts. 1 = one copy over all processes."""

    REFUSED: ClassVar[dict[str, str]] = {
        "gradient_accumulation_steps": "an update covers all of its rows, however many fit into memory at once; set "
        "the batch size to all of them, and max_tokens_per_microbatch where memory is short",
    }

    @model_validator(mode="before")
    @classmethod
    def _keep_best_by_name(cls, arguments: Any) -> Any:
        """Reads a text in keep_best as the name of a metric."""
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(values, Mapping) or not isinstance(values.get("keep_best"), str):
            return arguments
        values = {**values, "keep_best": {"metric": values["keep_best"]}}
        return ArgsKwargs((), values) if isinstance(arguments, ArgsKwargs) else values

    def __post_init__(self) -> None:
        """Refuses a resume without a folder, and a timeout that no exchange between processes can keep."""
        if self.collective_timeout_s < 1:
            raise ConfigError(
                f"collective_timeout_s must be at least 1 second, got {self.collective_timeout_s:g}; leave it out for "
                "its default, 1800"
            )
        if self.resume in ("true", "True"):
            raise ConfigError(f"resume={self.resume} names no checkpoint; write latest, or a checkpoint's folder")
        if self.resume == "latest" and self.run_dir is None and self.checkpoint_root_directory is None:
            raise ConfigError("resume='latest' needs run_dir (or checkpoint_root_directory); set it")
        options = self.checkpointing_options
        if self.hub_strategy == "every_save" and options and (options.sharded or options.enable_async_checkpointing):
            raise ConfigError(
                "hub_strategy=every_save sends the weights of each checkpoint, and sharded or asynchronous checkpoints "
                "have none in one file; set hub_strategy=end, which sends the final model"
            )

    @property
    def profiling(self) -> ProfilerOptions | None:
        """The profiler's options: profiler_options, or the defaults if only `profile` is set; None = no profile."""
        return self.profiler_options or (ProfilerOptions() if self.profile else None)

    @property
    def chosen_loggers(self) -> Sequence[Any]:
        """The loggers that were set, or TensorBoard where only a log_dir was set.

        >>> TrainingConfig(metrics_logging_options=MetricsLoggerOptions(log_dir="logs")).chosen_loggers
        ('tensorboard',)
        """
        options = self.metrics_logging_options
        return self.loggers or (("tensorboard",) if options is not None and options.log_dir is not None else ())

    @property
    def checkpoint_root(self) -> Name | None:
        """Where checkpoints lie: checkpoint_root_directory, or checkpoints/ in the run folder; None = nowhere."""
        if self.checkpoint_root_directory is not None:
            return self.checkpoint_root_directory
        return None if self.run_dir is None else f"{self.run_dir}/checkpoints"

    def token_budget(self, device: str, longest: int = 0, usual: int | None = None) -> int:
        """Returns tokens of one micro-batch on a kind of device: max_tokens_per_microbatch, or a default for the
        device.

        Args: device: "cpu" or another. longest: tokens of the longest sequence to come, prompt and completion; a
            default below it grows to it, rounded up to a multiple of 128. usual: the default; None = the device's.
        Returns: the budget, at least `longest`.
        Raises: ConfigError: max_tokens_per_microbatch is set and below `longest`.

        >>> TrainingConfig().token_budget("cpu"), TrainingConfig(max_tokens_per_microbatch=99).token_budget("cuda")
        (2048, 99)
        >>> TrainingConfig().token_budget("cpu", longest=3000)
        3072
        """
        budget = self.max_tokens_per_microbatch
        if budget is None:
            usual = usual or (2048 if device == "cpu" else 16384)
            return usual if longest <= usual else -(-longest // 128) * 128
        if budget < longest:
            raise ConfigError(
                f"trainer.max_tokens_per_microbatch={budget} is smaller than the longest sequence, {longest} tokens "
                f"(rollout.max_prompt_length + rollout.max_tokens_to_generate); set it to {longest} or more, or leave "
                "it out"
            )
        return budget

    def saturating_tokens(self, device: str) -> int | None:
        """Returns the number of tokens above which a larger micro-batch is no faster; None = unknown, or set by the
        user.

        >>> TrainingConfig().saturating_tokens("cpu")
        1536
        >>> TrainingConfig(max_tokens_per_microbatch=4096).saturating_tokens("cpu") is None
        True
        """
        return 1536 if device == "cpu" and self.max_tokens_per_microbatch is None else None


@config
class SupervisedTrainingConfig(TrainingConfig):
    """The loop of SFT, reward models and preference training: a step is one update on data.batch_size rows.

    >>> SupervisedTrainingConfig(gradient_accumulation_steps=4)
    Traceback (most recent call last):
    whet.errors.ConfigError: SupervisedTrainingConfig.gradient_accumulation_steps: an update covers all of its rows, \
however many fit into memory at once; set the batch size to all of them, and max_tokens_per_microbatch where memory is \
short
    """

    last_batch: Literal["drop", "keep"] = "keep"
    """Rows at the end of an epoch that fill no step: "keep" = make a smaller step, "drop" = leave them out and log
    their number."""


@config
class RLTrainingConfig(TrainingConfig):
    """The loop of GRPO and its relatives.

    >>> RLTrainingConfig(reward_timeout_s=0)
    Traceback (most recent call last):
    whet.errors.ConfigError: reward_timeout_s must be positive, got 0.0; None = no limit
    """

    actor_optimizer: OptimConfig | Name | Fn | None = None
    """From Python: an OptimConfig, a factory or "package.module:name"; None = the defaults. In YAML: actor.optim."""
    critic_optimizer: OptimConfig | Name | Fn | None = None
    """The critic's; None = as the actor's. In YAML: critic.optim."""
    mini_batch_size: Size | None = None
    """Prompts of one update; None = all of the step."""
    train_micro_batch_size: Size | None = None
    """Maximum number of prompts of one pass, within the token budget; None = only the token budget."""
    rollout_micro_batch_size: Size | None = None
    """Prompts rolled out at a time; None = all of the step."""
    compute_logps_micro_batch_size: Size | None = None
    """Maximum number of prompts of one scoring pass; None = only the token budget."""
    on_reward_error: Literal["raise", "none"] = "raise"
    """If a reward function fails: "raise" = end the run; "none" = warn, and count it as not applicable for that
    batch."""
    reward_timeout_s: Seconds | None = 60.0
    """Longest time of one call of a reward function, in seconds; None = no limit."""
    reward_workers: Number = 0
    """Processes that call the reward functions. A process is killed if its call takes too long or crashes. 0 = call
    them in this process, which can't end a call that hangs in C code."""
    warn_when: dict[Name, Band] | None = None
    """Warn when a metric leaves a band, and again when it gets worse: warn_when.kl.above=2.0. It replaces the default
    band of that metric; `whet docs troubleshooting` lists the defaults."""
    show_samples: Number = 0
    """Steps between two displays of a prompt with its best and its worst completion; 0 = never."""
    token_stats_every_n_steps: Number = 10
    """Steps between two that store each token's advantage, logprob and entropy under the trained model with the
    completions; 0 = never. They come from the update and cost no pass."""
    token_stats_max_mb: Float = 1000.0
    """Stop storing them when the run folder's completions/ has reached this size in megabytes."""
    last_batch: Literal["drop", "keep"] = "drop"
    """Prompts at the end of an epoch that fill no step: "drop" = leave them out and log their number, "keep" = make a
    smaller step."""

    def __post_init__(self) -> None:
        """Checks the batch sizes, as far as possible without the data."""
        super().__post_init__()
        if self.reward_timeout_s is not None and self.reward_timeout_s <= 0:
            raise ConfigError(f"reward_timeout_s must be positive, got {self.reward_timeout_s!r}; None = no limit")
        check_workers(self.reward_workers)
        if self.train_micro_batch_size is not None:
            if self.mini_batch_size is None:
                raise ConfigError(
                    "train_micro_batch_size: For RL training, `mini_batch_size` must be set when "
                    "`train_micro_batch_size` is set."
                )
            _check_divides(
                "train_micro_batch_size", self.train_micro_batch_size, "mini_batch_size", self.mini_batch_size
            )

    def check_batch_sizes(self, full: int) -> None:
        """Raises ConfigError: a size of the hierarchy of batches does not divide the next.

        mini_batch_size and rollout_micro_batch_size default to a whole step, train_micro_batch_size to mini_batch_size,
        compute_logps_micro_batch_size to train_micro_batch_size.
        Args: full: prompts of one step.

        >>> RLTrainingConfig(mini_batch_size=8, train_micro_batch_size=2).check_batch_sizes(32)
        """
        if isinstance(full, bool) or full != int(full) or full < 1:
            raise ConfigError(f"a step needs a positive number of prompts, got {full!r}")
        full = int(full)
        mini = self.mini_batch_size or full
        train = self.train_micro_batch_size or mini
        rollout = self.rollout_micro_batch_size or full
        logps = self.compute_logps_micro_batch_size or train
        _check_divides("mini_batch_size", mini, "batch_size", full)
        _check_divides("train_micro_batch_size", train, "mini_batch_size", mini)
        _check_divides("rollout_micro_batch_size", rollout, "batch_size", full)
        _check_divides("compute_logps_micro_batch_size", logps, "batch_size", full)


def _check_divides(small_name: str, small: int, big_name: str, big: int) -> None:
    if big % small:
        below = next((n for n in range(min(small - 1, big), 0, -1) if big % n == 0), None)
        above = next((n for n in range(small + 1, big + 1) if big % n == 0), None)
        use = " or ".join(str(n) for n in (below, above) if n)
        raise ConfigError(f"{big_name}={big} must be a multiple of {small_name}={small}; use {small_name}={use}")


@config
class ClusterConfig:
    """Where models lie, the engine, and the two sections they share. Holds objects: it can't be written in YAML.

    >>> ClusterConfig(rollout_config={"eval": RolloutConfig()})
    Traceback (most recent call last):
    whet.errors.ConfigError: rollout_config is a dict without Mode.TRAIN; give it an entry for training
    """

    device: Name | None = None
    """Where the models are loaded that are not given as modules: cpu, cuda, cuda:1 ...; None = the GPU if there is
    one."""
    rollout_engine: Name | Fn = "embedded"
    """"embedded", "hf", "vllm", "sglang", "mock", "package.module:name", or an engine's class or partial; "auto" = vllm
    on a GPU where it is installed and can do what is asked, else embedded."""
    offload_to_cpu: Bool = False
    """Keep models and optimizer state in pinned host memory while a phase does not use them: the reference is on the
    GPU while it scores, masters and moments during an update. No effect on a CPU."""
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    """The loop."""
    rollout_config: InstanceOf[RolloutConfig] | dict[Mode, RolloutConfig] = field(default_factory=RolloutConfig)
    """Sampling: one for both modes (with its `eval`), or one for each."""

    @field_validator("rollout_config", mode="before")
    @classmethod
    def _by_mode(cls, arguments: Any) -> Any:
        """Refuses the fields of a RolloutConfig where its entries for the modes are due."""
        if isinstance(arguments, list | tuple):
            raise ConfigError("is a list; give the RolloutConfig without the brackets")
        fields = {f.name for f in dataclasses.fields(RolloutConfig)} - {"eval"}  # which is a mode too
        if isinstance(arguments, Mapping) and arguments and fields.issuperset(arguments):
            raise ConfigError("is a dict of modes to RolloutConfigs; for both modes write RolloutConfig(**it)")
        return arguments

    def __post_init__(self) -> None:
        """Checks that training has a rollout configuration, and that the token budget holds its sequences."""
        if isinstance(self.rollout_config, dict) and Mode.TRAIN not in self.rollout_config:
            raise ConfigError("rollout_config is a dict without Mode.TRAIN; give it an entry for training")
        self.token_budget("cpu")  # refused here, before a model is loaded

    def token_budget(self, device: str, positions: int | None = None) -> int:
        """Returns tokens of one micro-batch on a kind of device, enough for the longest sequence of training's rollout.

        Args: device: "cpu" or another. positions: of the model that samples, which no sequence is longer than; None =
            not known, or without a bound.
        Raises: ConfigError: max_tokens_per_microbatch is set and below that.

        >>> long = RolloutConfig(max_prompt_length=9000, max_tokens_to_generate=100)
        >>> ClusterConfig(rollout_config=long).token_budget("cpu", positions=2100)
        2176
        """
        rollout = self.rollout_for(Mode.TRAIN)
        longest = rollout.max_prompt_length + rollout.most_tokens
        budget = self.training_config.max_tokens_per_microbatch
        has_turns = rollout.has_turns or rollout.agent is not None
        if has_turns and budget is not None:  # where an episode ends that began with one whole turn
            longest = max(min(longest, budget), rollout.max_prompt_length + rollout.max_tokens_to_generate)
        return self.training_config.token_budget(device, longest if positions is None else min(longest, positions))

    def rollout_for(self, mode: Mode | str) -> RolloutConfig:
        """Returns the sampling of a mode.

        Args: mode: Mode or its value.
        Returns: the dict's entry (training's where evaluation has none), or the one configuration with its `eval`.
        """
        if isinstance(self.rollout_config, dict):
            return self.rollout_config.get(Mode(mode), self.rollout_config[Mode.TRAIN])
        return self.rollout_config.for_mode(mode)
