"""Memory of a run, by arithmetic: bytes by role and phase from the configuration, before any weight is read.

The sizes of a model are counted, not estimated: its layers are built on the meta device, which has shapes and no
memory, and a forward pass there shows what is saved for the backward pass. RESERVE is for what a CUDA context, the
allocator's holes and the workspace of kernels take.
Of several processes, each on a GPU of its own, the plan is that of one: see parallel/fsdp.py for what it holds.
A supervised run has no rollout: its plan is that of its update. vLLM has weights of its own, and gives them up with its
KV while a step is scored and updated; with rollout.vllm.share_weights the frozen ones are there once.
Left out on purpose: the time that a setting costs, and the memory of SGLang.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whet.config import PPORunConfig, RMRunConfig, RoleConfig, RunConfig, SFTRunConfig, SupervisedRunConfig
from whet.errors import ConfigError
from whet.models.attention import ATTENTION, Layout
from whet.models.fast_layers import FastLayers
from whet.models.lora import add_adapter
from whet.models.pretrained import meta_model
from whet.models.projection import chunk_rows
from whet.models.varlen import MAX_KEYS

__all__ = [
    "GB",
    "LENGTH",
    "MOMENT_BYTES",
    "RESERVE",
    "VLLM_BYTES",
    "MemoryPlan",
    "ModelSizes",
    "Part",
    "ShapesLayout",
    "choose_settings",
    "choose_tokens",
    "free_gpu_memory",
    "longest_row",
    "measure_model",
    "plan_memory",
    "ways_to_fit",
    "with_assumed_lengths",
    "with_settings",
]

log = logging.getLogger("whet")

PlannedRun = RunConfig | SupervisedRunConfig

GB = 1e9
RESERVE = 1.5e9
"""Bytes for a CUDA context, the kernels' workspaces and holes of the allocator: a guess that no GPU has confirmed."""
VLLM_BYTES = 2e9
"""Bytes of vLLM's workspace and graphs in a rollout, half of which stay while it sleeps: a guess too."""
GRAPH_BYTES = 1e8
"""Bytes of the captured decode steps of whet's engine, without what a step computes: a guess."""
GRAPH_ROWS = 256
"""Rows of the largest captured step."""
MOMENT_BYTES = {"adamw": 8.0, "adam": 8.0, "adamw8bit": 2.1, "muon": 4.0, "sgd": 0.0}
"""Bytes of an optimizer's state for each trained parameter."""
_BYTES_IN_4_BITS = 0.5 + 4 / 64
"""Of one number: half a byte, and an fp32 scale for 64 of them."""
_TRIALS = (128, 256)
"""Tokens of the two passes from which the bytes of one token follow."""
_STEP = 512
"""Budgets of tokens are multiples of it."""
LENGTH = 512
"""Tokens of a prompt, and of a completion, where the configuration leaves them to the data and the model."""
CONVERSATION_BYTES = 4 * 2**30
"""The bound of the embedded engine on the KV of earlier turns, where kv_cache_tokens is not set."""
MAX_TOKENS = 16384
"""Tokens of a micro-batch beyond which a GPU is no faster."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, in numbers and bytes of its compute dtype."""

    parameters: int
    trained: int
    """Parameters with a gradient."""
    largest: int
    """Numbers of the largest trained parameter, whose gradient is held in the compute dtype for a moment."""
    weight_bytes: int
    """Of the weights as they are held, with the linear layers in 4 bits if the role asks for it."""
    layers: int
    layer_parameters: int
    """Of the largest decoder layer."""
    kv_bytes: int
    """Keys and values of one token, of all layers."""
    kv_heads: int
    """Of the layer that has the fewest."""
    activation_bytes: int
    """What the backward pass needs of one token, without checkpointing."""
    layer_input_bytes: int
    """The input of one layer for one token: what full checkpointing keeps of it."""
    dtype_bytes: int
    vocabulary: int
    """Rows of the LM head; 0 = it has a score head."""

    def logits(self, tokens: int, processes: int = 1) -> float:
        """Counts the bytes that the head holds: three copies of a chunk, and the sum of its weight's gradient.

        Args: tokens: of the pass. processes: that divide the vocabulary.
        """
        vocabulary = -(-self.vocabulary // processes)
        rows = chunk_rows(tokens, 4 * vocabulary, torch.device("cuda")) if vocabulary else 0
        return 3.0 * 4 * rows * vocabulary + (4.0 * self.largest / processes if rows else 0.0)

    def activations(self, tokens: int, checkpointing: str, keys: float = 1.0) -> float:
        """Returns bytes that a forward pass holds for its backward pass.

        Args:
            tokens: of the pass.
            checkpointing: "none" or "full"; others count as "none", which is an upper bound.
            keys: that attention gathers for each token, and holds: over 1 where sequences share a prompt.
        """
        per_token = self.activation_bytes + (keys - 1.0) * self.kv_bytes
        if checkpointing != "full":
            return per_token * tokens
        one_layer = per_token / self.layers
        return tokens * (self.layers * self.layer_input_bytes + one_layer)


@dataclass(frozen=True)
class Part:
    """What takes memory, and when."""

    name: str
    rollout: float
    """Bytes in the rollout."""
    update: float
    """Bytes in the update."""
    host: float = 0.0
    """Bytes in the memory of the host."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run's settings."""

    parts: tuple[Part, ...]
    tokens: int
    """Tokens of a micro-batch."""
    checkpointing: str
    kv_tokens: int

    @property
    def rollout(self) -> float:
        """Bytes in the rollout, with the reserve."""
        return sum(part.rollout for part in self.parts)

    @property
    def update(self) -> float:
        """Bytes in the update, with the reserve."""
        return sum(part.update for part in self.parts)

    @property
    def host(self) -> float:
        """Bytes of this process in the memory of its host."""
        return sum(part.host for part in self.parts)

    @property
    def peak(self) -> float:
        """The most bytes of any phase."""
        return max(self.rollout, self.update)


class ShapesLayout(Layout):
    """Attention by shapes alone: it keeps what a fused kernel keeps, and notes the bytes of keys and values."""

    def __init__(self, tokens: int) -> None:
        self.position_ids = torch.arange(tokens, device="meta")[None]
        self.kv_bytes: dict[int, int] = {}
        self.kv_heads: dict[int, int] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Returns a result of the right shape. Args: as Layout's."""
        self.kv_heads[layer] = k.shape[1]
        self.kv_bytes[layer] = (k.nbytes + v.nbytes) // k.shape[-2]
        return _FusedAttention.apply(q, k, v)  # type: ignore[no-any-return]


class _FusedAttention(torch.autograd.Function):
    """Saves queries, keys, values, the result and its log-sum-exp, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        same = q.shape[-1] == v.shape[-1]
        out = torch.empty_like(q) if same else q.new_empty((*q.shape[:-1], v.shape[-1]))  # in the order of q's memory
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("only the forward pass is counted")


def measure_model(role: RoleConfig, *, trained: bool, scores: bool = False) -> ModelSizes:
    """Counts the sizes of a role's model from its config, without weights.

    Args: role: its model, adapter and dtype; "auto" counts as bfloat16, which a GPU takes. trained: whether it is.
        scores: it has a score head in place of its LM head.
    Returns: the sizes.
    Raises: ConfigError: there is no model, or its config can't be read or has no language model.
    """
    if role.model is None:
        raise ConfigError("no model; write model=<hub name or folder>")
    module: Any = meta_model(role.model, role.trust_remote_code)
    if module is None:
        raise ConfigError(f"{role.model} has no config.json of a language model; name a folder or hub name of one")
    if scores:
        module.set_output_embeddings(nn.Linear(module.config.hidden_size, 1, bias=False, device="meta"))
    dtype = torch.float32 if role.dtype == "float32" else torch.bfloat16
    module = module.to(dtype).requires_grad_(trained and role.lora is None).train(trained)
    if trained and role.lora is not None:
        add_adapter(module, role.lora)
    in_4_bits = {x.weight for x in module.modules() if isinstance(x, nn.Linear) and not x.weight.requires_grad}
    in_4_bits -= {module.get_output_embeddings().weight}
    module.set_attn_implementation(ATTENTION)
    with FastLayers(module).enabled():  # as a worker's pass
        first, second = (_saved_bytes(module, tokens) for tokens in _TRIALS)
    layout = ShapesLayout(_TRIALS[0])
    _run(module, layout, _TRIALS[0])
    ids = {id(p) for p in in_4_bits} if role.quantization is not None else set()
    weight_bytes = sum(p.numel() * (_BYTES_IN_4_BITS if id(p) in ids else dtype.itemsize) for p in module.parameters())
    gradients = [p.numel() for p in module.parameters() if p.requires_grad]
    return ModelSizes(
        parameters=sum(p.numel() for p in module.parameters()),
        trained=sum(gradients),
        largest=max(gradients, default=0),
        weight_bytes=int(weight_bytes),
        layers=module.config.get_text_config().num_hidden_layers,
        layer_parameters=max(sum(p.numel() for p in x.parameters()) for x in module.get_decoder().layers),
        kv_bytes=sum(layout.kv_bytes.values()),
        kv_heads=min(layout.kv_heads.values()),
        activation_bytes=(second - first) // (_TRIALS[1] - _TRIALS[0]),
        layer_input_bytes=module.config.get_text_config().hidden_size * dtype.itemsize,
        dtype_bytes=dtype.itemsize,
        vocabulary=0 if scores else module.get_output_embeddings().weight.shape[0],
    )


def _run(module: nn.Module, layout: Layout, tokens: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    backbone: Any = module.base_model if hasattr(module, "base_model") else module
    backbone(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)


def _saved_bytes(module: nn.Module, tokens: int) -> int:
    """Returns bytes of the storages that a forward pass saves, parameters included, which are the same in each pass."""
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor  # held, so that no later storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _run(module, ShapesLayout(tokens), tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def plan_memory(
    config: PlannedRun,
    sizes: ModelSizes,
    *,
    memory: float | None = None,
    num_processes: int = 1,
    reference: float | None = None,
) -> MemoryPlan:
    """Returns the memory of a run on each of its GPUs, with settings that fit where the configuration leaves them open.

    Args:
        config: of a run with one trained model (supervised, GRPO, or PPO whose critic has the actor's size).
        sizes: of the trained model.
        memory: bytes of the GPU; None = as the configuration says, whether or not it fits.
        num_processes: each has a GPU; the mesh is that of config.trainer, which check_mesh has checked.
        reference: bytes of the weights of the reference; None = as the KL of `whet grpo` has it.
    Returns: the plan with the most tokens in a micro-batch that fits, without checkpointing if that leaves room for
        4,096 tokens or all of a step; the smallest one if nothing fits.
    """
    wanted = list(_candidates(config, sizes, num_processes, reference))
    if memory is None:
        return wanted[0]
    return next((plan for plan in wanted if plan.peak <= memory), wanted[-1])


def with_assumed_lengths(config: RunConfig) -> RunConfig:
    """Returns the configuration with LENGTH for each length of the rollout that it leaves to data and model."""
    missing = dict.fromkeys(config.rollout.open_lengths, LENGTH)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **missing)) if missing else config


def longest_row(config: PlannedRun) -> int:
    """Returns tokens of the longest sequence, or of the longest pair of supervised training, which is run at once.

    Lengths that the configuration leaves open count as LENGTH each. The rows may be longer where those of a supervised
    run have no data.max_length.
    """
    if isinstance(config, RunConfig):
        rollout = with_assumed_lengths(config).rollout
        return (rollout.max_prompt_length or LENGTH) + rollout.most_tokens
    return (config.data.max_length or 2 * LENGTH) * (1 if isinstance(config, SFTRunConfig) else 2)


def _candidates(
    config: PlannedRun, sizes: ModelSizes, num_processes: int, reference: float | None
) -> Iterator[MemoryPlan]:
    """Plans from the fastest to the smallest."""
    trainer, longest = config.trainer, longest_row(config)
    least = -(-longest // _STEP) * _STEP
    most = max(least, MAX_TOKENS * trainer.context_parallel_size)
    budgets = [trainer.max_tokens_per_microbatch] if trainer.max_tokens_per_microbatch else []
    budgets = budgets or [n for n in (most, most // 2, most // 4, most // 8, least) if n >= least]
    chosen = _trained_role(config).gradient_checkpointing
    modes = [chosen] if chosen != "auto" else ["none", "full"]
    counts, rows = [0], 0
    if isinstance(config, RunConfig):
        rows, bound = config.rollout.max_batch_size, config.rollout.kv_cache_tokens
        counts = [max(n, longest) for n in ([bound] if bound else [rows * longest // k for k in (1, 2, 4, 8, 16)])]
    combinations = [
        (mode, tokens)
        for mode in modes
        for tokens in budgets
        if len(modes) == 1 or mode == "full" or tokens >= min(4096, budgets[0])
    ]
    weights = _held_weights(config, sizes, num_processes, reference)
    for kv_tokens in counts:
        for mode, tokens in combinations:
            held = [*weights, *_held_in_passes(config, sizes, tokens, mode, kv_tokens, kv_tokens < rows * longest)]
            parts = tuple(part for part in held if part.rollout or part.update or part.host)
            yield MemoryPlan(parts, tokens, mode, kv_tokens)


def _trained_role(config: PlannedRun) -> RoleConfig:
    """Returns the section of the model that is trained."""
    role: RoleConfig = getattr(config, config.TRAINED)
    return role


def _held_weights(config: PlannedRun, sizes: ModelSizes, num_processes: int, reference: float | None) -> list[Part]:
    """Returns the parts of weights, moments and gradients, of all models.

    With several processes trained weights are fp32 shards, which the optimizer updates. The whole model in its compute
    dtype is there during the rollout, or with tensor parallelism a process's part of it; during the update, embedding,
    norm and head, one layer, and the next one.
    Gradients are whole between the passes of an update, and become shards as the last pass goes through the layers, or
    as each pass does (sync_each_microbatch). Tensor parallelism divides layers, embedding and head; in the rollout the
    last two are whole, beside the parts that they are gathered from. With offload_to_cpu shards lie on the host, those
    of gradients too, and those of one layer at a time are copied to the device.
    """
    own_critic = isinstance(config, PPORunConfig) and not (config.critic and config.critic.model == "actor")
    models, role = (2 if own_critic else 1), _trained_role(config)
    weights, width = float(sizes.weight_bytes), sizes.dtype_bytes
    masters = 4.0 * sizes.trained if width < 4 else 0.0
    moments = MOMENT_BYTES.get(role.optim.name, 8.0) * sizes.trained
    gradients = 4.0 * sizes.trained + sizes.largest * width
    if reference is None:
        has_kl = isinstance(config, RunConfig) and (config.algo.beta or config.algo.force_compute_kl)
        reference = weights if has_kl and role.lora is None else 0.0
    gathered, own_grads, offloads = Part("gathered weights", 0.0, 0.0), 0.0, num_processes > 1 and config.offload_to_cpu
    if num_processes > 1:
        shards = num_processes // config.trainer.data_parallel_replicate_size
        tensor = config.trainer.tensor_parallel_size
        outside = sizes.parameters - sizes.layers * sizes.layer_parameters
        layer, outside_part = sizes.layer_parameters / tensor, outside / tensor
        held = 1 / shards
        whole = float(sizes.parameters)
        if tensor > 1:  # a rollout with whole matrices also has what they are gathered from
            whole = sizes.parameters / tensor + (outside if _divides_rollout(config) else sizes.parameters)
        in_passes = outside_part + min(2, sizes.layers) * layer
        reference, moments, masters = reference * held, moments * held, 0.0
        weights = (4.0 * sizes.trained + width * (sizes.parameters - sizes.trained)) * held
        copied = weights * max(layer, outside_part) / sizes.parameters if offloads else 0.0
        gathered = Part(gathered.name, float(width * whole) + copied, float(width * in_passes) + copied)
        own_grads = 4.0 * sizes.trained * held
        kept = sizes.trained / tensor if not config.trainer.sync_each_microbatch else 0.0 if offloads else own_grads / 4
        gradients = 4.0 * kept + min(sizes.trained / tensor, max(layer, outside_part)) * (4.0 + width)
    vllm = width * sizes.parameters if isinstance(config, RunConfig) and config.rollout_engine == "vllm" else 0
    place = lambda name, size: Part(name, 0.0, 0.0, size) if offloads else Part(name, size, size)
    return [
        place("weights" if num_processes == 1 else "shards of weights", models * weights),
        gathered,
        Part("weights of vLLM", 0.0 if _shares_weights(config, num_processes) else float(vllm), 0.0),
        place("fp32 masters", models * masters),
        place(f"{role.optim.name} moments", models * moments),
        place("reference model", reference),
        Part("gradients", 0.0, gradients, own_grads if offloads else 0.0),
    ]


def _shares_weights(config: PlannedRun, num_processes: int = 1) -> bool:
    """Returns whether vLLM's weights are the trainer's frozen ones, if vLLM samples."""
    role = _trained_role(config)
    is_frozen = role.lora is not None and not role.lora.modules_to_save and role.quantization is None
    return isinstance(config, RunConfig) and config.rollout.vllm.share_weights and is_frozen and num_processes == 1


def _divides_rollout(config: PlannedRun) -> bool:
    """Returns whether the processes that divide matrices sample together, if there are several."""
    return isinstance(config, RunConfig) and config.rollout_engine in ("auto", "embedded")


def _held_in_passes(
    config: PlannedRun, sizes: ModelSizes, tokens: int, checkpointing: str, kv_tokens: int, is_bounded: bool
) -> list[Part]:
    """Returns the parts of a pass of training, and of the engine. Args: is_bounded: its cache is."""
    own_tokens, keys = -(-tokens // config.trainer.context_parallel_size), _gathered_keys(config)
    turns = graphs = workspace = 0.0
    divides = _divides_rollout(config)
    kv_bytes = sizes.kv_bytes / (min(config.trainer.tensor_parallel_size, sizes.kv_heads) if divides else 1)
    if isinstance(config, RunConfig) and config.rollout_engine == "vllm":
        workspace = VLLM_BYTES
    elif isinstance(config, RunConfig):
        if not divides or config.trainer.tensor_parallel_size == 1:
            graphs = GRAPH_BYTES + GRAPH_ROWS * sizes.activation_bytes / sizes.layers
        if config.rollout.max_turns > 1 and not is_bounded:
            turns = float(min(CONVERSATION_BYTES, kv_bytes * kv_tokens))
    return [
        Part(f"activations, {own_tokens:,} tokens", 0.0, sizes.activations(own_tokens, checkpointing, keys)),
        Part("logits of the head, in parts", 0.0, sizes.logits(own_tokens, config.trainer.tensor_parallel_size)),
        Part(f"KV cache, {kv_tokens:,} tokens", kv_bytes * kv_tokens, 0.0),
        Part("KV of earlier turns", turns, 0.0),
        Part("captured decode steps", graphs, graphs),
        Part("workspace and graphs of vLLM", workspace, workspace / 2),
        Part("reserve", RESERVE, RESERVE),
    ]


def _gathered_keys(config: PlannedRun) -> float:
    """Returns the keys that attention gathers for each token: a completion's are its prompt's, which is there once, and
    its own. Rows with more than MAX_KEYS take another kernel, which gathers none.
    """
    if isinstance(config, SFTRunConfig):
        return 1.0
    if not isinstance(config, RunConfig):
        return 5 / 3  # pairs whose prompt is as long as an answer
    rollout, count = with_assumed_lengths(config).rollout, config.algo.num_generations
    prompt, completion = rollout.max_prompt_length or LENGTH, rollout.most_tokens
    return min(MAX_KEYS, (prompt + count * (prompt + completion)) / (prompt + count * completion))


def with_settings(config: PlannedRun, plan: MemoryPlan) -> Sequence[str]:
    """Returns the settings of a plan that differ from the configuration, as words of a command."""
    words = []
    if config.trainer.max_tokens_per_microbatch != plan.tokens:
        words.append(f"trainer.max_tokens_per_microbatch={plan.tokens}")
    if _trained_role(config).gradient_checkpointing != plan.checkpointing:
        words.append(f"{config.TRAINED}.gradient_checkpointing={plan.checkpointing}")
    if isinstance(config, RunConfig):
        unbounded = config.rollout.max_batch_size * longest_row(config)  # it decodes faster
        if (config.rollout.kv_cache_tokens or unbounded) != plan.kv_tokens:
            words.append(f"rollout.kv_cache_tokens={plan.kv_tokens}")
    return words


def free_gpu_memory() -> float | None:
    """Returns the bytes that are free on the current CUDA device; None = there is none."""
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


C = TypeVar("C", bound=RunConfig)
S = TypeVar("S", bound=SupervisedRunConfig)


def choose_settings(config: C, memory: float, num_processes: int = 1) -> C:
    """Sets what the user left open so that a run fits a GPU, and logs one line with the choice and its reason.

    Args:
        config: of a run with the embedded engine or vLLM, whose lengths are set.
        memory: free bytes of the GPU; of several, of the one that has the least.
        num_processes: each has a GPU; see plan_memory.
    Returns: the configuration with the token budget, the checkpointing and the bound of the KV cache of its plan. It
        is unchanged if the model's sizes can't be counted.
    Raises: ConfigError: no setting fits; the largest part and what makes it smaller. Where the user set all three, or
        offload_to_cpu, a warning takes its place.
    """

    def make_plan() -> tuple[MemoryPlan, float]:
        sizes = measure_model(config.actor, trained=True)
        sizes_of = lambda role: measure_model(role, trained=False).weight_bytes if role and role.model else 0
        teacher, reward = sizes_of(config.teacher), sizes_of(config.reward_model)
        shards = num_processes // config.trainer.data_parallel_replicate_size
        read = (teacher + reward) / shards + (reward if num_processes > 1 else 0)  # which is whole while it scores
        return plan_memory(config, sizes, memory=memory - read, num_processes=num_processes), read

    plan = _checked_plan(make_plan, config, memory, num_processes, bool(config.rollout.kv_cache_tokens))
    if plan is None:
        return config
    bounded = config.rollout.kv_cache_tokens or plan.kv_tokens < config.rollout.max_batch_size * longest_row(config)
    if config.rollout_engine == "vllm":  # a bound, unless the user chose its share
        bounded = bounded or config.rollout.vllm.hbm_utilization is None
    changes = {
        "actor": dataclasses.replace(config.actor, gradient_checkpointing=plan.checkpointing),
        "trainer": dataclasses.replace(config.trainer, max_tokens_per_microbatch=plan.tokens),
        "rollout": dataclasses.replace(config.rollout, kv_cache_tokens=plan.kv_tokens if bounded else None),
    }
    if config.critic is not None and config.critic.gradient_checkpointing == "auto":
        changes["critic"] = dataclasses.replace(config.critic, gradient_checkpointing=plan.checkpointing)
    return dataclasses.replace(config, **changes)


def choose_tokens(
    config: S, memory: float, num_processes: int = 1, *, reference: RoleConfig | None = None
) -> tuple[S, int | None]:
    """`choose_settings` of a supervised run.

    Args: reference: the model that the loss compares with, where it is not the trained one without its adapter.
    Returns: the configuration with the checkpointing of its plan; and the usual token budget, which is no setting
        because longer rows raise it. None = the model's sizes can't be counted.
    Raises: ConfigError: as choose_settings.
    """

    def make_plan() -> tuple[MemoryPlan, float]:
        scores = isinstance(config, RMRunConfig)
        sizes = measure_model(config.trained, trained=True, scores=scores)
        held = 0.0 if reference is None else float(measure_model(reference, trained=False).weight_bytes)
        return plan_memory(config, sizes, memory=memory, num_processes=num_processes, reference=held), 0.0

    plan = _checked_plan(make_plan, config, memory, num_processes, True)
    if plan is None:
        return config, None
    role = dataclasses.replace(config.trained, gradient_checkpointing=plan.checkpointing)
    return dataclasses.replace(config, **{config.TRAINED: role}), plan.tokens


def _checked_plan(
    make_plan: Callable[[], tuple[MemoryPlan, float]],
    config: PlannedRun,
    memory: float,
    num_processes: int,
    is_kv_set: bool,
) -> MemoryPlan | None:
    """Returns the plan of a run, which is logged; None = there is none, or it is the user's to try.

    Args: make_plan: gives the plan, and the bytes of the weights that are only read. is_kv_set: nothing of the
        rollout is open.
    Raises: ConfigError: no setting fits.
    """
    try:
        plan, read = make_plan()
    except Exception as error:  # such as a model with code of its own, which the meta device can't run
        log.warning("memory is not planned, because the model's sizes can't be counted: %s", error)
        return None
    words = " ".join(with_settings(config, plan))
    needs = f"the largest phase needs {(plan.peak + read) / GB:.1f} GB by plan, {memory / GB:.1f} GB are free"
    if plan.peak + read <= memory:
        log.info("memory: %s%s", needs, f"; chosen to fit: {words}" if words else "")
        return plan
    part = max(plan.parts, key=lambda part: part.rollout if plan.rollout >= plan.update else part.update)
    size = max(part.rollout, part.update) / GB
    ways = ways_to_fit(config, part, num_processes)
    message = f"{needs}; the largest part is {part.name}: {size:.1f} GB. Try {ways}"
    role, trainer = config.TRAINED, config.trainer
    mode = _trained_role(config).gradient_checkpointing
    if config.offload_to_cpu or (trainer.max_tokens_per_microbatch and is_kv_set and mode != "auto"):
        log.warning("the run may not fit: %s", message)
        return None
    keys = ["trainer.max_tokens_per_microbatch", f"{role}.gradient_checkpointing"]
    keys += ["rollout.kv_cache_tokens"] if isinstance(config, RunConfig) else []
    raise ConfigError(
        f"the run does not fit: {message}. To try it all the same, set {', '.join(keys[:-1])} and {keys[-1]}"
    )


def ways_to_fit(config: PlannedRun, part: Part | None = None, num_processes: int = 1) -> str:
    """Returns the settings that make a run smaller.

    Args: part: the largest one, which decides which come first. num_processes: each has a GPU.
    """
    ways, name, role = [], config.TRAINED, _trained_role(config)
    if part is not None and part.name.startswith("KV"):
        ways.append("a smaller rollout.kv_cache_tokens or rollout.max_tokens_to_generate")
    if part is not None and part.name.startswith("activations"):
        ways.append(f"{name}.gradient_checkpointing=full, a smaller trainer.max_tokens_per_microbatch")
    if role.lora is None:
        ways += [f"{name}.lora.r=16", f"{name}.optim.name=adamw8bit"]
    elif role.quantization is None and num_processes == 1:
        ways.append(f"{name}.quantization=nf4")
        if isinstance(config, RunConfig) and config.rollout_engine == "vllm" and not _shares_weights(config):
            ways.append("rollout.vllm.share_weights=true")
    if num_processes > 1:
        ways += [] if config.trainer.sync_each_microbatch else ["trainer.sync_each_microbatch=true"]
        ways += [] if config.offload_to_cpu else ["offload_to_cpu=true"]
        ways += ["more processes", "a larger trainer.context_parallel_size"]
    return " or ".join(ways or ["a smaller model"])
