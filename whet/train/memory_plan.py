"""Memory of a run, by arithmetic: bytes by role and phase from the configuration, before any weight is read.

The sizes of a model are counted, not estimated: its layers are built on the meta device, which has shapes and no
memory, and a forward pass there shows what is saved for the backward pass. RESERVE is for what a CUDA context, the
allocator's holes and the workspace of kernels take.
Of several processes, each on a GPU of its own, the plan is that of one: see parallel/fsdp.py for what it holds.
Left out on purpose: the time that a setting costs, and the memory of vLLM and SGLang.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whet.config import PPORunConfig, RoleConfig, RunConfig
from whet.errors import ConfigError
from whet.models.attention import ATTENTION, Layout
from whet.models.linear_logprob import CHUNK_BYTES
from whet.models.lora import add_adapter
from whet.models.pretrained import meta_model

__all__ = [
    "GB",
    "LENGTH",
    "RESERVE",
    "MemoryPlan",
    "ModelSizes",
    "Part",
    "choose_settings",
    "free_gpu_memory",
    "measure_model",
    "plan_memory",
    "ways_to_fit",
    "with_lengths",
    "with_settings",
]

log = logging.getLogger("whet")

GB = 1e9
RESERVE = 1.5e9
"""Bytes for a CUDA context, the kernels' workspaces and holes of the allocator: a guess that no GPU has confirmed."""
_MOMENTS = {"adamw": 8.0, "adam": 8.0, "adamw8bit": 2.1, "muon": 4.0, "sgd": 0.0}
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
    activation_bytes: int
    """What the backward pass needs of one token, without checkpointing."""
    layer_input_bytes: int
    """The input of one layer for one token: what full checkpointing keeps of it."""
    dtype_bytes: int

    def activations(self, tokens: int, checkpointing: str) -> float:
        """Bytes that a forward pass holds for its backward pass. Args: checkpointing: "none" or "full"; others count
        as "none", which is an upper bound.
        """
        if checkpointing != "full":
            return float(self.activation_bytes * tokens)
        one_layer = self.activation_bytes / self.layers
        return tokens * (self.layers * self.layer_input_bytes + one_layer)


@dataclass(frozen=True)
class Part:
    """What takes memory, and when."""

    name: str
    rollout: float
    """Bytes in the rollout."""
    update: float
    """Bytes in the update."""


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
    def peak(self) -> float:
        """The most bytes of any phase."""
        return max(self.rollout, self.update)


class _ShapesLayout(Layout):
    """Attention by shapes alone: it keeps what a fused kernel keeps, and notes the bytes of keys and values."""

    def __init__(self, tokens: int) -> None:
        self.position_ids = torch.arange(tokens, device="meta")[None]
        self.kv_bytes: dict[int, int] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
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


def measure_model(role: RoleConfig, *, trained: bool) -> ModelSizes:
    """Counts the sizes of a role's model from its config, without weights.

    Args: role: its model, adapter and dtype; "auto" counts as bfloat16, which a GPU takes. trained: whether it is.
    Returns: the sizes.
    Raises: ConfigError: there is no model, or its config can't be read or has no language model.
    """
    if role.model is None:
        raise ConfigError("no model; write model=<hub name or folder>")
    module: Any = meta_model(role.model, role.trust_remote_code)
    if module is None:
        raise ConfigError(f"{role.model} has no config.json of a language model; name a folder or hub name of one")
    dtype = torch.float32 if role.dtype == "float32" else torch.bfloat16
    module = module.to(dtype).requires_grad_(trained and role.lora is None).train(trained)
    if trained and role.lora is not None:
        add_adapter(module, role.lora)
    in_4_bits = {x.weight for x in module.modules() if isinstance(x, nn.Linear) and not x.weight.requires_grad}
    in_4_bits -= {module.get_output_embeddings().weight}
    module.set_attn_implementation(ATTENTION)
    first, second = (_saved_bytes(module, tokens) for tokens in _TRIALS)
    layout = _ShapesLayout(_TRIALS[0])
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
        activation_bytes=(second - first) // (_TRIALS[1] - _TRIALS[0]),
        layer_input_bytes=module.config.get_text_config().hidden_size * dtype.itemsize,
        dtype_bytes=dtype.itemsize,
    )


def _run(module: nn.Module, layout: Layout, tokens: int) -> None:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    backbone: Any = module.base_model if hasattr(module, "base_model") else module
    backbone(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)


def _saved_bytes(module: nn.Module, tokens: int) -> int:
    """Bytes of the storages that a forward pass saves, parameters apart."""
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            saved[storage] = tensor  # held, so that no later storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _run(module, _ShapesLayout(tokens), tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def plan_memory(
    config: RunConfig, sizes: ModelSizes, *, memory: float | None = None, num_processes: int = 1
) -> MemoryPlan:
    """The memory of a run on each of its GPUs, with settings that fit where the configuration leaves them open.

    Args:
        config: of a run with one trained model (GRPO, or PPO whose critic has the actor's size).
        sizes: of the actor.
        memory: bytes of the GPU; None = as the configuration says, whether or not it fits.
        num_processes: each has a GPU; the mesh is that of config.trainer, which check_mesh has checked.
    Returns: the plan with the most tokens in a micro-batch that fits, without checkpointing if that leaves room for
        4,096 tokens or all of a step; the smallest one if nothing fits.
    """
    wanted = list(_candidates(config, sizes, num_processes))
    if memory is None:
        return wanted[0]
    return next((plan for plan in wanted if plan.peak <= memory), wanted[-1])


def with_lengths(config: RunConfig) -> RunConfig:
    """The configuration with LENGTH for each length of the rollout that it leaves to data and model."""
    missing = dict.fromkeys(config.rollout.open_lengths, LENGTH)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **missing)) if missing else config


def _candidates(config: RunConfig, sizes: ModelSizes, num_processes: int) -> Iterator[MemoryPlan]:
    """Plans from the fastest to the smallest."""
    rollout, trainer = with_lengths(config).rollout, config.trainer
    longest = (rollout.max_prompt_length or LENGTH) + rollout.most_tokens
    least = -(-longest // _STEP) * _STEP
    most = max(least, MAX_TOKENS * trainer.context_parallel_size)
    budgets = [trainer.max_tokens_per_microbatch] if trainer.max_tokens_per_microbatch else []
    budgets = budgets or [n for n in (most, most // 2, most // 4, most // 8, least) if n >= least]
    chosen = config.actor.gradient_checkpointing
    modes = [chosen] if chosen != "auto" else ["none", "full"]
    rows = rollout.max_batch_size
    counts = [rollout.kv_cache_tokens] if rollout.kv_cache_tokens else [rows * longest // k for k in (1, 2, 4, 8, 16)]
    combinations = [
        (mode, tokens)
        for mode in modes
        for tokens in budgets
        if len(modes) == 1 or mode == "full" or tokens >= min(4096, budgets[0])
    ]
    for kv_tokens in counts:
        for mode, tokens in combinations:
            bounded = kv_tokens < rows * longest
            yield _plan(config, sizes, tokens, mode, max(kv_tokens, longest), num_processes, bounded=bounded)


def _held_weights(config: RunConfig, sizes: ModelSizes, num_processes: int) -> list[Part]:
    """The parts of weights, moments and gradients, of all models.

    With several processes trained weights are fp32 shards, which the optimizer updates. The whole model in its compute
    dtype is there during the rollout; during the update, embedding, norm and head, one layer, and the next one.
    Gradients are whole between the passes of an update, and become shards as the last pass goes through the layers, or
    as each pass does (sync_each_microbatch). Tensor parallelism divides layers, and leaves embedding and head whole.
    """
    own_critic = isinstance(config, PPORunConfig) and not (config.critic and config.critic.model == "actor")
    models = 2 if own_critic else 1
    weights, width = float(sizes.weight_bytes), sizes.dtype_bytes
    masters = 4.0 * sizes.trained if width < 4 else 0.0
    moments = _MOMENTS.get(config.actor.optim.name, 8.0) * sizes.trained
    gradients = 4.0 * sizes.trained + sizes.largest * width
    reference = weights if (config.algo.beta or config.algo.force_compute_kl) and config.actor.lora is None else 0.0
    gathered = Part("gathered weights", 0.0, 0.0)
    if num_processes > 1:
        shards = num_processes // config.trainer.data_parallel_replicate_size
        tensor = config.trainer.tensor_parallel_size
        outside = sizes.parameters - sizes.layers * sizes.layer_parameters
        layer = sizes.layer_parameters / tensor
        divided = (outside + sizes.layers * layer) / sizes.parameters  # the share that tensor parallelism leaves
        held = divided * tensor / shards
        whole = sizes.parameters * (1 if tensor == 1 else 1 + divided)  # the rollout also has what it is gathered from
        gathered = Part(gathered.name, float(width * whole), float(width * (outside + min(2, sizes.layers) * layer)))
        reference, moments, masters = reference * held, moments * held, 0.0
        weights = (4.0 * sizes.trained + width * (sizes.parameters - sizes.trained)) * held
        kept = sizes.trained * (held if config.trainer.sync_each_microbatch else divided)
        gradients = 4.0 * kept + min(sizes.trained, max(layer, outside)) * (4.0 + width)
    return [
        Part("weights" if num_processes == 1 else "shards of weights", models * weights, models * weights),
        gathered,
        Part("fp32 masters", models * masters, models * masters),
        Part(f"{config.actor.optim.name} moments", models * moments, models * moments),
        Part("reference model", reference, reference),
        Part("gradients", 0.0, gradients),
    ]


def _plan(
    config: RunConfig,
    sizes: ModelSizes,
    tokens: int,
    checkpointing: str,
    kv_tokens: int,
    num_processes: int,
    *,
    bounded: bool,
) -> MemoryPlan:
    own_tokens = -(-tokens // config.trainer.context_parallel_size)
    turns = 0.0
    if config.rollout.max_turns > 1 and not bounded:
        turns = float(min(CONVERSATION_BYTES, sizes.kv_bytes * kv_tokens))
    all_parts = [
        *_held_weights(config, sizes, num_processes),
        Part(f"activations, {own_tokens:,} tokens", 0.0, sizes.activations(own_tokens, checkpointing)),
        Part("logits of the head, in parts", 0.0, 3.0 * CHUNK_BYTES),
        Part(f"KV cache, {kv_tokens:,} tokens", float(sizes.kv_bytes * kv_tokens), 0.0),
        Part("KV of earlier turns", turns, 0.0),
        Part("reserve", RESERVE, RESERVE),
    ]
    parts = tuple(part for part in all_parts if part.rollout or part.update)
    return MemoryPlan(parts, tokens, checkpointing, kv_tokens)


def with_settings(config: RunConfig, plan: MemoryPlan) -> Sequence[str]:
    """The settings of a plan that differ from the configuration, as words of a command."""
    words = []
    if config.trainer.max_tokens_per_microbatch != plan.tokens:
        words.append(f"trainer.max_tokens_per_microbatch={plan.tokens}")
    if config.actor.gradient_checkpointing != plan.checkpointing:
        words.append(f"actor.gradient_checkpointing={plan.checkpointing}")
    rollout = with_lengths(config).rollout
    longest = (rollout.max_prompt_length or LENGTH) + rollout.most_tokens
    if (rollout.kv_cache_tokens or rollout.max_batch_size * longest) != plan.kv_tokens:  # unbounded it decodes faster
        words.append(f"rollout.kv_cache_tokens={plan.kv_tokens}")
    return words


def free_gpu_memory() -> float | None:
    """The bytes that are free on the current CUDA device; None = there is none."""
    return float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None


C = TypeVar("C", bound=RunConfig)


def choose_settings(config: C, memory: float, num_processes: int = 1) -> C:
    """Sets what the user left open so that a run fits a GPU, and logs one line with the choice and its reason.

    Args:
        config: of a run with the embedded engine, whose lengths are set.
        memory: free bytes of the GPU; of several, of the one that has the least.
        num_processes: each has a GPU; see plan_memory.
    Returns: the configuration with the token budget, the checkpointing and the bound of the KV cache of its plan. It
        is unchanged if the model's sizes can't be counted.
    Raises: ConfigError: no setting fits; the largest part and what makes it smaller. Where the user set all three, or
        offload_to_cpu, a warning takes its place.
    """
    try:
        sizes = measure_model(config.actor, trained=True)
        sizes_of = lambda role: measure_model(role, trained=False).weight_bytes if role and role.model else 0
        teacher, reward = sizes_of(config.teacher), sizes_of(config.reward_model)
        shards = num_processes // config.trainer.data_parallel_replicate_size
        read = (teacher + reward) / shards + (reward if num_processes > 1 else 0)  # which is whole while it scores
    except Exception as error:  # such as a model with code of its own, which the meta device can't run
        log.warning("memory is not planned, because the model's sizes can't be counted: %s", error)
        return config
    plan = plan_memory(config, sizes, memory=memory - read, num_processes=num_processes)
    words = " ".join(with_settings(config, plan))
    needs = f"the largest phase needs {(plan.peak + read) / GB:.1f} GB by plan, {memory / GB:.1f} GB are free"
    if plan.peak + read > memory:
        part = max(plan.parts, key=lambda part: part.rollout if plan.rollout >= plan.update else part.update)
        size = max(part.rollout, part.update) / GB
        message = (
            f"{needs}; the largest part is {part.name}: {size:.1f} GB. Try {ways_to_fit(config, part, num_processes)}"
        )
        trainer, rollout, mode = config.trainer, config.rollout, config.actor.gradient_checkpointing
        if config.offload_to_cpu or (trainer.max_tokens_per_microbatch and rollout.kv_cache_tokens and mode != "auto"):
            log.warning("the run may not fit: %s", message)
            return config
        raise ConfigError(
            f"the run does not fit: {message}. To try it all the same, set trainer.max_tokens_per_microbatch, "
            "actor.gradient_checkpointing and rollout.kv_cache_tokens"
        )
    log.info("memory: %s%s", needs, f"; chosen to fit: {words}" if words else "")
    longest = (config.rollout.max_prompt_length or LENGTH) + config.rollout.most_tokens
    bounded = config.rollout.kv_cache_tokens or plan.kv_tokens < config.rollout.max_batch_size * longest
    changes = {
        "actor": dataclasses.replace(config.actor, gradient_checkpointing=plan.checkpointing),
        "trainer": dataclasses.replace(config.trainer, max_tokens_per_microbatch=plan.tokens),
        "rollout": dataclasses.replace(config.rollout, kv_cache_tokens=plan.kv_tokens if bounded else None),
    }
    if config.critic is not None and config.critic.gradient_checkpointing == "auto":
        changes["critic"] = dataclasses.replace(config.critic, gradient_checkpointing=plan.checkpointing)
    return dataclasses.replace(config, **changes)


def ways_to_fit(config: RunConfig, part: Part | None = None, num_processes: int = 1) -> str:
    """The settings that make a run smaller.

    Args: part: the largest one, which decides which come first. num_processes: each has a GPU.
    """
    ways = []
    if part is not None and part.name.startswith("KV"):
        ways.append("a smaller rollout.kv_cache_tokens, shorter rollout.max_tokens_to_generate")
    if part is not None and part.name.startswith("activations"):
        ways.append("actor.gradient_checkpointing=full, a smaller trainer.max_tokens_per_microbatch")
    if config.actor.lora is None:
        ways += ["actor.lora.r=16", "actor.optim.name=adamw8bit"]
    elif config.actor.quantization is None and num_processes == 1:
        ways.append("actor.quantization=nf4")
    if num_processes > 1:
        ways += [] if config.trainer.sync_each_microbatch else ["trainer.sync_each_microbatch=true"]
        ways += ["more processes", "a larger trainer.context_parallel_size"]
    return " or ".join(ways or ["a smaller model"])
