"""The forward pass of training and scoring: from a micro-batch to log-probabilities, entropies or values.

The head runs only on the hidden states that predict a target.
Dim legend: B rows, T tokens, s targets, n sequences, V vocabulary, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from whet.errors import ConfigError
from whet.models.heads import Head
from whet.models.linear_divergence import HeadStates, linear_divergence
from whet.models.linear_logprob import linear_stats
from whet.models.matmul import row_chunks
from whet.models.projection import CHUNK_BYTES, Projection, chunk_rows
from whet.models.vocabulary import VocabularyPart
from whet.ops.logits_processors import LogitsProcessors, process_logits
from whet.ops.logprobs import entropy as entropy_of
from whet.ops.logprobs import is_argmax, log_sum_sq_probs, selective_log_softmax
from whet.ops.masked import to_fp32
from whet.packing.micro_batch import MicroBatch
from whet.types import TokenStats
from whet.util.transfer import to_device

if TYPE_CHECKING:
    from whet.models.loaded_model import LoadedModel

__all__ = ["TeacherTarget", "head_states", "model_stats", "token_stats"]

PLAIN = LogitsProcessors()
MAX_KEPT_BYTES = 16_000_000
"""Full logits up to this size are kept for the backward pass; autograd keeps several copies of them."""
TeacherTarget = tuple[HeadStates, float]
"""The teacher's states at the same targets, and the β of the divergence."""


def token_stats(
    loaded: LoadedModel,
    micro: MicroBatch,
    *,
    processors: LogitsProcessors = PLAIN,
    entropy: bool = False,
    constants: Collection[str] = (),
    allowed: Tensor | None = None,
    outputs: Collection[str] | None = None,
    teacher: TeacherTarget | None = None,
) -> TokenStats:
    """Runs a model, and computes the statistics of each target of a micro-batch.

    An LM head gives log π(aₜ | s, a₍<t₎) under the sampler's distribution (`processors`), and its entropy. A score head
    gives V of the state before aₜ. Greedy decoding (temperature 0) is scored at temperature 1.

    Args:
        loaded: the model; of a view the caller enters `use_view`.
        micro: the micro-batch; it has a layout if the model is packable, and is padded if not.
        processors: make the sampler's distribution.
        entropy: compute the entropies too.
        constants: compute these of types.loss.CONSTANTS too; they have no gradient.
        allowed: uint8 [s, W], one bit for each token that a constraint allows (see process_logits); None = no
            constraint.
        outputs: "logprobs", "values" and "scores", as needed; None = all that the heads compute.
        teacher: compute the divergence from this teacher's distribution too; its states are of the same micro-batch.
    Returns: TokenStats of [s] tensors with a gradient, in fp32 or float64: logprobs, entropy and divergence, and the
        values of a score head. With a micro-batch that was planned with at_end, also its scores [n].
    Raises: ConfigError: a packed micro-batch for a model that is not packable; an output without its head; a divergence
        under processors that are more than a temperature.

    Example: `[token_stats(loaded, m) for m in plan_micro_batches(batch, max_tokens=4096, packable=loaded.packable)]`.
    """
    _check_packable(loaded, micro)
    outputs = loaded.outputs if outputs is None else outputs
    if missing := set(outputs) - loaded.outputs:
        names = ", ".join(sorted(missing))
        raise ConfigError(f"{loaded.name} has no head for {names}; load the model with role='critic' or 'actor'")
    return model_stats(
        loaded.module,
        micro,
        head=loaded.lm_head if "logprobs" in outputs else Head("none"),
        score_head=loaded.score_head if {"values", "scores"} & set(outputs) else None,
        processors=processors,
        entropy=entropy,
        constants=constants,
        allowed=allowed,
        teacher=teacher,
    )


def head_states(loaded: LoadedModel, micro: MicroBatch, temperature: float = 1.0) -> HeadStates:
    """Returns the hidden states and the linear head that give the logits of a micro-batch's targets.

    Args: loaded: the model. micro: the micro-batch. temperature: the logits are divided by it.
    Raises: ConfigError: a packed micro-batch for a model that is not packable; a model without a linear head.
    """
    _check_packable(loaded, micro)
    if not loaded.lm_head.linear:
        raise _no_linear_head(loaded.module)
    hidden = _states(loaded.module, micro).index_select(0, micro.hidden_index)
    return _linear_head_states(loaded.module, loaded.lm_head, hidden, temperature)


def _linear_head_states(module: PreTrainedModel, head: Head, hidden: Tensor, temperature: float) -> HeadStates:
    layer: Any = module.get_output_embeddings()
    part = VocabularyPart.of(layer.weight)
    hidden = hidden if part is None else part.read(hidden)
    return HeadStates(hidden, layer.weight, layer.bias, Projection(temperature, head.scale, head.softcap))


def _no_linear_head(module: PreTrainedModel) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__} has no linear head, so its full distribution can't be compared chunk by chunk; set "
        "algo.policy_loss_fn='distillation', which compares the sampled tokens"
    )


def _check_packable(loaded: LoadedModel, micro: MicroBatch) -> None:
    if micro.layout is not None and not loaded.packable:
        raise ConfigError(
            f"{loaded.name} can't run packed sequences ({'; '.join(loaded.unpackable_reasons)}); build the "
            "micro-batches with packable=False"
        )


def model_stats(
    module: PreTrainedModel,
    micro: MicroBatch,
    *,
    head: Head,
    score_head: nn.Linear | None = None,
    processors: LogitsProcessors = PLAIN,
    entropy: bool = False,
    constants: Collection[str] = (),
    allowed: Tensor | None = None,
    teacher: TeacherTarget | None = None,
) -> TokenStats:
    """token_stats as a method of the root module, so that `register_fsdp_forward_method` can bind it there.

    Args: module: the root module. head: its LM head, of kind "none" if logprobs are not needed. score_head: the head
        that computes values; None = values are not needed. The other arguments and the result: see token_stats.

    Example: `module.stats = MethodType(model_stats, module)`, then `register_fsdp_forward_method(module, "stats")`.
    """
    if teacher is not None and not head.linear:
        raise _no_linear_head(module)
    layer: Any = module.get_output_embeddings()
    states = _states(module, micro) if head.linear or score_head is not None else None
    hidden = None if states is None else states.index_select(0, micro.hidden_index)
    values = scores = None
    if score_head is not None and states is not None and hidden is not None:
        of_head = lambda rows: to_fp32(score_head(rows)).squeeze(1).clone()  # FSDP warns of a module that returns views
        values, last = of_head(hidden), micro.last_index
        scores = None if last is None else of_head(states.index_select(0, last))
    elif micro.last_index is not None:
        raise ConfigError("scores come from a score head; load the model with role='critic'")
    if head.kind == "none":
        return TokenStats(values=values, scores=scores)
    if teacher is not None and not processors.plain:
        raise ConfigError(
            f"a divergence compares full distributions, which may have a temperature only; got {processors}"
        )
    if hidden is not None and head.linear and processors.plain:
        # a distribution with a temperature only: without storing all logits
        states = _linear_head_states(module, head, hidden, processors.temperature or 1.0)
        stats = linear_stats(
            states.hidden,
            states.weight,
            micro.targets,
            bias=states.bias,
            temperature=states.projection.temperature,
            scale=states.projection.scale,
            softcap=states.projection.softcap,
            entropy=entropy,
            constants=constants,
        )
        divergence = None if teacher is None else linear_divergence(states, teacher[0], gkd_beta=teacher[1])
        stats = dataclasses.replace(stats, divergence=divergence)
        return dataclasses.replace(stats, values=values, scores=scores)
    if head.linear:
        assert hidden is not None
        vocab, logits = layer.weight.shape[0], lambda s: head.logits(layer(hidden[s]))
    else:
        rows = module(**_inputs(micro)).logits.flatten(0, 1).index_select(0, micro.hidden_index)
        vocab, logits = rows.shape[1], lambda s: to_fp32(rows[s])
    stats = _full_logits_stats(logits, micro, vocab, processors, entropy, constants, allowed)
    return dataclasses.replace(stats, values=values, scores=scores)


def _inputs(micro: MicroBatch) -> dict[str, object]:
    """Returns the keyword arguments of the forward pass."""
    if micro.layout is None:
        return {"input_ids": micro.input_ids, "attention_mask": micro.attention_mask, "use_cache": False}
    return {
        "input_ids": micro.input_ids,
        "position_ids": micro.layout.position_ids,
        "whet_layout": micro.layout,
        "use_cache": False,
    }


def _states(module: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """[B·T D]: the last hidden states of all tokens."""
    return module.get_decoder()(**_inputs(micro)).last_hidden_state.flatten(0, 1)


def _full_logits_stats(
    logits: Callable[[slice], Tensor],
    micro: MicroBatch,
    vocab: int,
    processors: LogitsProcessors,
    entropy: bool,
    constants: Collection[str],
    allowed: Tensor | None,
) -> TokenStats:
    """Statistics from full logits, in chunks of rows; several chunks are computed again in the backward pass."""
    first_places, places = _first_places(micro, vocab) if processors.penalises else (None, None)
    position = _turn_positions(micro) if processors.min_tokens else micro.position

    def chunk_stats(s: slice) -> tuple[Tensor | None, ...]:
        seen = None
        if first_places is not None and places is not None:
            seen = first_places.index_select(0, micro.sequence[s]) < places[s, None]
        targets = micro.targets[s]
        bits = None if allowed is None else to_device([allowed[s]], targets.device)[0]
        z = process_logits(logits(s), processors, seen=seen, position=position[s], keep=targets, allowed=bits)
        correct = is_argmax(z, targets) if "correct" in constants else None
        log_sum = log_sum_sq_probs(z.detach()) if "log_sum_sq_probs" in constants else None
        mean = to_fp32(z.detach()).mean(-1) if "mean_logits" in constants else None
        return selective_log_softmax(z, targets), entropy_of(z) if entropy else None, correct, log_sum, mean

    count, size = len(micro.hidden_index), vocab * 4
    # a quarter of the fused head's on a GPU: sorting and autograd hold more copies of a chunk
    slices = list(row_chunks(count, chunk_rows(count // 4, size, micro.targets.device, chunk_bytes=CHUNK_BYTES)))
    slices = slices or [slice(0, 0)]  # a process may have no target of a pass
    if count * size <= MAX_KEPT_BYTES or not torch.is_grad_enabled():
        chunks = [chunk_stats(s) for s in slices]
    else:
        chunks = [checkpoint(chunk_stats, s, use_reentrant=False) for s in slices]
    names = ("logprobs", "entropy", "correct", "log_sum_sq_probs", "mean_logits")
    return TokenStats(**{n: None if x[0] is None else torch.cat(x) for n, x in zip(names, zip(*chunks), strict=True)})


def _turn_positions(micro: MicroBatch) -> Tensor:
    """Long [s]: the number of tokens of the same turn before each target, as the sampler's min_tokens counts them.

    A turn is a run of sampled tokens. The tokens between two turns keep their position in the completion.

    Example: in a completion of 5, the third token comes from an environment: positions 0, 1, 2, 0, 1.
    """
    if micro.share is not None:  # a turn may begin before this process's part
        return _turn_positions(micro.share.whole).index_select(0, micro.share.targets)
    sampled = micro.batch.versions.index_select(0, micro.on_host.token_index) >= 0
    (sampled,) = to_device([sampled], micro.token_index.device)
    index = torch.arange(len(sampled), device=sampled.device)
    starts = (micro.position == 0) | ~sampled.roll(1)
    start = torch.where(starts, index, 0).cummax(0).values
    return torch.where(sampled, index - start, micro.position)


def _first_places(micro: MicroBatch, vocab: int) -> tuple[Tensor, Tensor]:
    """Returns the data of a repetition penalty, which tell whether a token occurs before a target in its sequence.

    Returns: int32 [n V], the place where each token first occurs in each sequence, prefix included (past the end if it
        does not occur); long [s], the place of each target in its sequence.
    """
    batch, device = micro.batch, micro.input_ids.device
    ends, lengths = batch.ends.tolist(), batch.lengths.tolist()
    first = torch.full((len(micro.sequences), vocab), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)
    prefixes, tokens, places = [], [], []
    for row, i in enumerate(micro.on_host.sequences.tolist()):
        prefix = batch.prefix(i)
        prefixes.append(len(prefix))
        ids = torch.cat([prefix, batch.tokens[ends[i] - lengths[i] : ends[i]]])
        tokens.append(ids + row * vocab)
        places.append(torch.arange(len(ids), dtype=torch.int32))
    index, place, start = to_device([torch.cat(tokens), torch.cat(places), torch.tensor(prefixes)], device)
    first.view(-1).scatter_reduce_(0, index, place, "amin")
    return first, start.index_select(0, micro.sequence) + micro.position
