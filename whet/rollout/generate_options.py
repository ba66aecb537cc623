"""Options of transformers' generate without a field of whet, and beam search: both for the hf engine.

transformers builds its logits processors from these options and whet's fields together, in its own order; draws and
logprobs are of the resulting distribution. A beam is found by search, not drawn: the reported logprobs of its tokens
are the model's own, at temperature 1, without processors.
Left out on purpose: internals of generate (caches, watermarks), and beams that are sampled or diverse.
Dim legend: n rows or prompts, k completions of each, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, InstanceOf
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteriaList

from whet.config.base import config, config_from_dict
from whet.config.fields import Bool, Count, Float, Int, Number
from whet.config.rollout import OWN_FIELDS
from whet.errors import ConfigError, EngineError
from whet.models.prompt_tuning import is_prompt_tuned, prompt_in_generate
from whet.rollout.base import Output, Request, Sampling
from whet.rollout.stopping import Decode, find_end, find_stop_string

__all__ = [
    "beam_search",
    "check_generate_options",
    "check_trainable",
    "freeze_options",
    "logits_processors",
    "num_beams",
    "validate_options",
]

TokenIds = Annotated[list[Number], Field(min_length=1)]
Share = Annotated[Float, Field(gt=0, lt=1)]


@config
class _Options:
    """The options and their types; None = off."""

    bad_words_ids: Annotated[list[TokenIds], Field(min_length=1)] | None = None
    begin_suppress_tokens: TokenIds | None = None
    early_stopping: Bool | Literal["never"] | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    exponential_decay_length_penalty: tuple[Int, Float] | None = None
    forced_eos_token_id: Number | TokenIds | None = None
    length_penalty: Float | None = None
    no_repeat_ngram_size: Count | None = None
    num_beams: Count | None = None
    sequence_bias: Annotated[list[tuple[TokenIds, InstanceOf[float]]], Field(min_length=1)] | None = None
    top_h: Annotated[Float, Field(gt=0, le=1)] | None = None
    typical_p: Share | None = None

    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(vars(GenerationConfig()), "belongs to the inside of transformers' generate; leave it out"),
        **{name: f"has a field of its own: set {field}" for name, field in OWN_FIELDS.items()},
    }


def validate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options as transformers takes them. Raises ConfigError: one that is unknown or whet's own, a value out of
    range.

    >>> validate_options({"num_beans": 2})
    Traceback (most recent call last):
    whet.errors.ConfigError: generation_kwargs: unknown key num_beans; did you mean num_beams?
    """
    try:
        return vars(config_from_dict(_Options, options, short=OWN_FIELDS))
    except ConfigError as error:
        raise ConfigError(f"generation_kwargs: {error}") from None


def freeze_options(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns options in a hashable form: sorted, lists as tuples, a mapping as pairs, without None.

    >>> freeze_options({"sequence_bias": {(5, 6): 2.0}, "no_repeat_ngram_size": 3})
    (('no_repeat_ngram_size', 3), ('sequence_bias', (((5, 6), 2.0),)))
    """
    return tuple((name, _freeze(value)) for name, value in sorted(options.items()) if value is not None)


def _freeze(value: Any) -> Any:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    return tuple(map(_freeze, pairs)) if isinstance(pairs, list | tuple) else pairs


def num_beams(sampling: Sampling) -> int:
    """Returns the number of beams of a Sampling; 1 = no beam search."""
    return dict(sampling.generation_kwargs).get("num_beams", 1)


def check_generate_options(request: Request, *, vocabulary: int) -> None:
    """Refuses a request with invalid options.

    Args: request: to check. vocabulary: the number of the model's ids.
    Raises: ConfigError: an unknown name, an invalid value or id, or options that contradict each other or other fields;
        EngineError: a request for which there is no beam.
    """
    sampling, options = request.sampling, dict(request.sampling.generation_kwargs)
    validate_options(options)
    for name in options.keys() & {"bad_words_ids", "begin_suppress_tokens", "forced_eos_token_id", "sequence_bias"}:
        if (i := max(_ids(options[name]))) >= vocabulary:
            raise ConfigError(f"generation_kwargs: {name}: token {i} is outside the vocabulary of {vocabulary}")
    beams, drawn = num_beams(sampling), sampling.temperature > 0
    faults: tuple[tuple[Sequence[str], bool, str], ...] = (
        (list(options), sampling.constraint is not None, ": they do not go together with a constraint; keep one"),
        (["exponential_decay_length_penalty"], not sampling.stop_ids, " needs a stop token; give eos_tokens"),
        (["early_stopping", "length_penalty"], beams == 1, " ranks beams; give num_beams above 1 too"),
        (["epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"], beams > 1, " truncates draws, not beams: drop it"),
        (["num_beams"], beams > 1 and drawn, " searches, it does not draw: set temperature=0.0"),
    )
    for names, wrong, why in faults:
        if wrong and (options_set := [f"{name}={options[name]!r}" for name in names if name in options]):
            raise ConfigError(f"generation_kwargs: {', '.join(options_set)}{why}")
    if beams > 1 and (request.offset or request.rng_key[3] >= beams):
        where = f"after {request.offset} tokens, generation {request.rng_key[3]}"
        raise EngineError(f"request {request.id}: {where}, but num_beams={beams} gives {beams} beams of a bare prompt")


def _ids(value: Any) -> list[int]:
    """Returns the integers in nested tuples."""
    if isinstance(value, tuple):
        return [i for part in value for i in _ids(part)]
    return [value] if isinstance(value, int) else []


def check_trainable(sampling: Sampling) -> None:
    """Raises ConfigError for what the trainer can't compute: beams, and options under logprobs_mode "processed"."""
    names, beams = [name for name, _ in sampling.generation_kwargs], num_beams(sampling)
    if beams != 1:
        raise ConfigError(
            f"rollout.generation_kwargs: num_beams={beams} searches: its completions are not draws of the policy, so "
            "they have no policy gradient; use it only in eval: {generation_kwargs: {...}, temperature: 0.0}"
        )
    if names and sampling.logprobs_mode == "processed":
        raise ConfigError(
            f"rollout.generation_kwargs: {', '.join(names)}: the trainer does not know the distribution that they "
            'lead to; set logprobs_mode="full" (the whole distribution on both sides), or use them in eval: {...}'
        )


def _generate(module: Any, ids: Tensor, request: Request, *, num_generations: int = 1, **arguments: Any) -> Any:
    """Calls transformers' generate under a Sampling, without the model's own generation config.

    Args:
        ids: Long [n, T], prompts and completions so far.
        request: one of the requests; all have its Sampling and offset.
        num_generations: completions of a prompt.
        arguments: of generate.
    """
    sampling, prompts = request.sampling, ids[:, : ids.shape[1] - request.offset]  # lengths count from the prompt's end
    fields: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "eos_token_id": list(sampling.stop_ids) or None,
        "max_new_tokens": request.offset + sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens or None,
        "num_return_sequences": num_generations,
        "pad_token_id": sampling.stop_ids[0] if sampling.stop_ids else 0,
        "repetition_penalty": float(sampling.repetition_penalty),
        "suppress_tokens": list(sampling.forbidden_ids) or None,
    }
    if sampling.temperature > 0:
        fields |= {"temperature": float(sampling.temperature), "top_k": sampling.top_k, "top_p": sampling.top_p}
        fields["min_p"] = sampling.min_p or None
    options = validate_options(dict(sampling.generation_kwargs))
    if options.get("sequence_bias"):  # older releases take the token 0 only in a mapping
        options["sequence_bias"] = {tuple(tokens): bias for tokens, bias in options["sequence_bias"]}
    generation_config = GenerationConfig(**fields, **options)
    base = module.get_base_model() if is_prompt_tuned(module) else module
    own_config, base.generation_config = base.generation_config, GenerationConfig()
    try:
        mask = torch.ones_like(prompts)
        with prompt_in_generate(module):
            return module.generate(
                input_ids=prompts, attention_mask=mask, generation_config=generation_config, **arguments
            )
    finally:
        base.generation_config = own_config


def logits_processors(module: Any, ids: Tensor, request: Request) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the logits processors of transformers for a batch. Args: as `_generate`.

    Returns: (ids so far, fp32 logits [n, V]) -> the scores [n, V] to draw from.
    """
    return_processors: Any = lambda *_, logits_processor, **__: logits_processor
    return _generate(module, ids, request, custom_generate=return_processors)


def beam_search(module: nn.Module, batch: Sequence[Request], *, decode: Decode | None, version: int) -> list[Output]:
    """Returns the best completions of prompts of equal lengths.

    Args:
        module: a model of transformers, in eval mode, with its own attention.
        batch: requests of equal lengths and one Sampling; generation g of a prompt is its g-th best beam.
        decode: ids -> text, for stop strings.
        version: stamped on the tokens.
    Returns: an output for each request, in order.
    """
    sampling, device = batch[0].sampling, next(module.parameters()).device
    prompts, place = np.unique(np.stack([r.tokens for r in batch]), axis=0, return_inverse=True)
    ids = torch.from_numpy(prompts.astype(np.int64)).to(device)
    count = max(r.rng_key[3] for r in batch) + 1
    criteria = [_stop_string_criterion(decode, sampling.stop, ids.shape[1])] if sampling.stop and decode else []
    stopping: Any = StoppingCriteriaList(criteria)
    beams = _generate(module, ids, batch[0], num_generations=count, stopping_criteria=stopping)
    rows = [beams[i * count + r.rng_key[3]] for i, r in zip(place.ravel().tolist(), batch, strict=True)]
    return [_output(module, r, row, decode, version) for r, row in zip(batch, rows, strict=True)]


def _output(module: nn.Module, request: Request, row: Tensor, decode: Decode | None, version: int) -> Output:
    """Returns a request's beam up to its end, with the model's own logprobs."""
    sampling, prompt = request.sampling, len(request.tokens)
    tokens = row[prompt:].tolist()
    length, reason = find_end(sampling, tokens, new=len(tokens), decode=decode) or (len(tokens), "length")
    tokens = tokens[:length]
    ids = row[None, : prompt + len(tokens)]
    logits = module(input_ids=ids, use_cache=False).logits[0, -len(tokens) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, prompt:, None]).squeeze(1)
    return Output(
        id=request.id,
        tokens=np.array(tokens, np.int32),
        logprobs=logprobs.cpu().numpy(),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason=reason,
        logits=logits.cpu().numpy() if sampling.return_logits else None,
    )


def _stop_string_criterion(decode: Decode, stop: Sequence[str], prompt: int) -> Any:
    """Returns a stopping criterion: which beams have completed a stop string. It is called after each token."""
    ended: set[tuple[int, ...]] = set()

    def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        rows = [tuple(row) for row in ids[:, prompt:].tolist()]
        ended.update(row for row in rows if row[:-1] in ended or find_stop_string(decode, row, stop, new=1))
        return torch.tensor([row in ended for row in rows], device=ids.device)

    return criterion
