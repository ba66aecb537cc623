"""Options of transformers' generate that whet has no field for: which there are, and what they do to a draw.

Options that change the distribution are transformers' own logits processors, so that draws and logprobs are of the
distribution that they make. Their order: those in BEFORE, then whet's own fields (penalty, forbidden ids, temperature,
truncation), then those in AFTER. It is transformers' but for two that meet whet's fields there in another order: the
repetition penalty stands second, and top_h before top-k.
Beam search is whet.rollout.beams.
Left out on purpose: what belongs to generate's inside (caches, assistants, watermarks), which is refused by name.
Dim legend: n rows, V vocabulary, T tokens so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from whet.config.rollout import OWN_FIELDS
from whet.errors import ConfigError, EngineError, nearest
from whet.ops.logprobs import selective_log_softmax
from whet.ops.support import Support, draw, greedy, support_logits
from whet.rollout.base import Request, Sampling

__all__ = [
    "BEAMS",
    "Place",
    "Processors",
    "check_names",
    "check_options",
    "check_trainable",
    "frozen_options",
    "num_beams",
    "place_of",
    "thawed_options",
]

Processor = Callable[[Any, Any], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a batch of equal lengths stands: what some processors are made with."""

    prompt: int
    """Tokens before the completion."""
    whole: int
    """Tokens when the completion has its longest."""
    stop_ids: tuple[int, ...]
    device: torch.device


def _processor(name: str) -> Callable[..., Processor]:
    """A class of transformers' logits processors."""
    from transformers.generation import logits_process

    return getattr(logits_process, name)


def _stops(place: Place, name: str) -> list[int]:
    if not place.stop_ids:
        raise ConfigError(f"generation_kwargs: {name} needs a stop token; give eos_tokens")
    return list(place.stop_ids)


BEFORE: dict[str, Callable[[Any, Place], Processor]] = {
    "sequence_bias": lambda v, p: _processor("SequenceBiasLogitsProcessor")(v),
    "no_repeat_ngram_size": lambda v, p: _processor("NoRepeatNGramLogitsProcessor")(v),
    "bad_words_ids": lambda v, p: _processor("NoBadWordsLogitsProcessor")(v, list(p.stop_ids) or None),
    "forced_eos_token_id": lambda v, p: _processor("ForcedEOSTokenLogitsProcessor")(p.whole, v, device=p.device),
    "exponential_decay_length_penalty": lambda v, p: _processor("ExponentialDecayLengthPenalty")(
        tuple(v), _stops(p, "exponential_decay_length_penalty"), p.prompt
    ),
    "begin_suppress_tokens": lambda v, p: _processor("SuppressTokensAtBeginLogitsProcessor")(
        v, p.prompt, device=p.device
    ),
}
"""Options at work on the model's logits, in their order."""
AFTER: dict[str, Callable[[Any, Place], Processor]] = {
    "top_h": lambda v, p: _processor("TopHLogitsWarper")(v),
    "typical_p": lambda v, p: _processor("TypicalLogitsWarper")(v),
    "epsilon_cutoff": lambda v, p: _processor("EpsilonLogitsWarper")(v),
    "eta_cutoff": lambda v, p: _processor("EtaLogitsWarper")(v, device=p.device),
}
"""Options at work on scores that are divided by the temperature and truncated, in their order."""
BEAMS = ("num_beams", "early_stopping", "length_penalty")
"""Options of beam search."""
RULES = {
    "bad_words_ids": "lists of token ids, e.g. [[5, 6]]",
    "begin_suppress_tokens": "token ids, e.g. [5, 6]",
    "early_stopping": 'true, false or "never"',
    "epsilon_cutoff": "a number above 0 and below 1",
    "eta_cutoff": "a number above 0 and below 1",
    "exponential_decay_length_penalty": "a place and a factor, e.g. [20, 1.05]",
    "forced_eos_token_id": "a token id, or a list of them",
    "length_penalty": "a number",
    "no_repeat_ngram_size": "a positive integer",
    "sequence_bias": "token ids and a float each, e.g. [[[5, 6], -2.0]]",
    "top_h": "a number above 0, at most 1",
    "typical_p": "a number above 0 and below 1",
}
"""What the value of an option is."""


def frozen_options(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options in a form that can be compared and hashed: sorted, lists as tuples, a mapping as pairs.

    >>> frozen_options({"sequence_bias": {(5, 6): 2.0}, "no_repeat_ngram_size": 3})
    (('no_repeat_ngram_size', 3), ('sequence_bias', (((5, 6), 2.0),)))
    """
    return tuple((name, _frozen(options[name])) for name in sorted(options))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((_frozen(k), _frozen(v)) for k, v in value.items())
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def thawed_options(sampling: Sampling) -> dict[str, Any]:
    """The options of a Sampling as transformers takes them, with lists.

    >>> thawed_options(Sampling(generation_kwargs=(("bad_words_ids", ((5, 6),)),)))
    {'bad_words_ids': [[5, 6]]}
    """
    return {name: _thawed(value) for name, value in sampling.generation_kwargs}


def _thawed(value: Any) -> Any:
    return [_thawed(v) for v in value] if isinstance(value, tuple) else value


def check_names(names: Iterable[str]) -> None:
    """Refuses options that are unknown, that whet has a field for, or that have no place here.

    Raises: ConfigError: with the nearest match, the field to set, or the list of what there is.

    >>> check_names(["num_beans"])
    Traceback (most recent call last):
    whet.errors.ConfigError: unknown generation option 'num_beans'; did you mean num_beams or num_beam_groups?
    """
    from transformers import GenerationConfig

    taken = (*BEAMS, *BEFORE, *AFTER)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")} | OWN_FIELDS.keys()
    for name in names:
        if name in OWN_FIELDS:
            raise ConfigError(f"generation_kwargs: {name} has a field of its own: set {OWN_FIELDS[name]}")
        if name not in known:
            raise ConfigError(
                f"unknown generation option {name!r}{nearest(name, known) or '. Known: ' + ', '.join(sorted(taken))}"
            )
        if name not in taken:
            raise ConfigError(
                f"generation option {name!r} belongs to the inside of transformers' generate, which whet does not run; "
                f"leave it out. There are {', '.join(sorted(taken))}"
            )


def check_options(request: Request, *, vocabulary: int) -> None:
    """Refuses a request whose options can't be carried out; one without options passes.

    Args: request: to check. vocabulary: ids that the model knows.
    Raises: ConfigError: a name as in `check_names`, a value that transformers refuses, a constraint, a beam search that
        is asked to draw; EngineError: a request that no beam answers.
    """
    sampling, options = request.sampling, thawed_options(request.sampling)
    if not options:
        return
    check_names(options)
    beams = num_beams(sampling)
    for name, value in options.items():
        if value is not None and name != "num_beams":
            _check_value(name, value, vocabulary)
    if sampling.constraint is not None:
        raise ConfigError(
            f"generation_kwargs ({', '.join(sorted(options))}) do not go together with a constraint "
            f"({sampling.constraint}): they know nothing of what it allows; keep one"
        )
    if beams == 1 and (lone := sorted(options.keys() & set(BEAMS) - {"num_beams"})):
        raise ConfigError(f"generation_kwargs: {lone[0]} says how beams are ranked; give num_beams above 1 too")
    Processors(sampling, place_of(request, torch.device("cpu")))
    if beams == 1:
        return
    if sampling.temperature:
        raise ConfigError(
            f"num_beams={options['num_beams']} searches, it does not draw: set temperature=0.0 (got "
            f"{sampling.temperature:g})"
        )
    if request.offset:
        raise EngineError(f"request {request.id}: a beam search can't go on from {request.offset} tokens; start anew")
    if request.address[3] >= beams:
        raise EngineError(
            f"request {request.id} is generation {request.address[3]}, but num_beams={options['num_beams']} gives so "
            "many completions of a prompt at most; raise num_beams"
        )


def _check_value(name: str, value: Any, vocabulary: int) -> None:
    """Raises ConfigError for a value of another form than the rule's, and for ids outside the vocabulary.

    What is left, the range of a number above all, transformers' processors check when they are made.
    """
    number = lambda x: isinstance(x, int | float) and not isinstance(x, bool)
    ids: list[Any] = []
    fits = True
    try:
        if name == "bad_words_ids":
            ids = [i for word in value for i in word]
        elif name == "begin_suppress_tokens":
            ids = list(value)
        elif name == "sequence_bias":
            ids = [i for word, _ in value for i in word]
            fits = all(isinstance(bias, float) for _, bias in value)
        elif name == "forced_eos_token_id":
            ids = value if isinstance(value, list) else [value]
        elif name == "exponential_decay_length_penalty":
            start, factor = value
            fits = isinstance(start, int) and number(factor)
        elif name == "early_stopping":
            fits = isinstance(value, bool) or value == "never"
        elif name == "no_repeat_ngram_size":
            fits = isinstance(value, int) and not isinstance(value, bool)
        else:
            fits = number(value)
    except (TypeError, ValueError):
        fits = False
    if not fits or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"generation_kwargs: {name}={value!r}: must be {RULES[name]}")
    if outside := [i for i in ids if not 0 <= i < vocabulary]:
        raise ConfigError(
            f"generation_kwargs: {name}={value!r}: token {outside[0]} is outside the vocabulary of {vocabulary}; give "
            f"ids from 0 to {vocabulary - 1}"
        )


def num_beams(sampling: Sampling) -> int:
    """Beams of a Sampling; 1 = no beam search. Raises ConfigError where it is no positive integer."""
    count = dict(sampling.generation_kwargs).get("num_beams", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"num_beams must be a positive integer, got {count!r}")
    return count


def place_of(request: Request, device: torch.device) -> Place:
    """Where a request's completion begins and ends."""
    prompt = len(request.tokens) - request.offset
    whole = len(request.tokens) + request.sampling.max_tokens
    return Place(prompt=prompt, whole=whole, stop_ids=request.sampling.stop_ids, device=device)


def check_trainable(sampling: Sampling) -> None:
    """Refuses to train on a distribution that the trainer can't compute.

    Raises: ConfigError: beam search; options under logprob_support "sampling".

    >>> check_trainable(Sampling(generation_kwargs=(("num_beams", 4),)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: rollout.generation_kwargs: num_beams=4 searches: its completions are no draws ...
    """
    if not sampling.generation_kwargs:
        return
    if (beams := num_beams(sampling)) > 1:
        raise ConfigError(
            f"rollout.generation_kwargs: num_beams={beams} searches: its completions are no draws of the policy, so "
            "there is no gradient to take from them; leave it to eval: {generation_kwargs: {...}, temperature: 0.0}"
        )
    if sampling.logprob_support == "sampling":
        names = ", ".join(name for name, _ in sampling.generation_kwargs)
        raise ConfigError(
            f"rollout.generation_kwargs: {names}: the trainer does not know the distribution that this makes; set "
            'logprob_support="full" (logprobs of the whole distribution on both sides), or leave it to eval: {...}'
        )


class Processors:
    """Draws under a Sampling with options, for rows of equal lengths.

    Args: sampling: with options other than beams. place: of the rows.
    Raises: ConfigError: a value that transformers refuses.
    """

    def __init__(self, sampling: Sampling, place: Place) -> None:
        options = {n: v for n, v in thawed_options(sampling).items() if v is not None}
        self._before = [_made(make, name, options, place) for name, make in BEFORE.items() if name in options]
        self._after = [_made(make, name, options, place) for name, make in AFTER.items() if name in options]
        self._greedy = sampling.temperature == 0
        self._full = sampling.logprob_support == "full"

    def scores(self, ids: Tensor, logits: Tensor, support: Support, *, seen: Tensor | None, position: Tensor) -> Tensor:
        """Scores of the distribution drawn from.

        Args: ids: Long [n, T], prompt and completion so far. logits [n, V]. support: whet's own fields. seen,
            position: as in support_logits.
        Returns: fp32 [n, V].
        Raises: EngineError: the options leave a row no token.
        """
        scores = logits.float()
        for process in self._before:
            scores = process(ids, scores)
        scores = support_logits(scores, support, seen=seen, position=position)
        for process in () if self._greedy else self._after:
            scores = process(ids, scores)
        if not bool((scores > -torch.inf).any(1).all()):
            raise EngineError("generation_kwargs leave no token to draw; loosen bad_words_ids or no_repeat_ngram_size")
        return scores

    def draw(
        self,
        ids: Tensor,
        logits: Tensor,
        support: Support,
        reported: Support,
        *,
        u: Tensor,
        position: Tensor,
        seen: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One token for each row, and its logprob under the distribution drawn from, or under `reported`.

        Args: as `scores`. reported: whose logprobs logprob_support "full" means. u: float64 [n], the numbers of the
            draws.
        Returns: (Long [n], fp32 [n]).
        """
        scores = self.scores(ids, logits, support, seen=seen, position=position)
        tokens = greedy(scores) if self._greedy else draw(scores, u)
        if self._full:
            scores = support_logits(logits.float(), reported, position=position)
        return tokens, selective_log_softmax(scores, tokens)


def _made(make: Callable[[Any, Place], Processor], name: str, options: Mapping[str, Any], place: Place) -> Processor:
    try:
        return make(options[name], place)
    except ConfigError:
        raise
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"generation_kwargs: {name}={options[name]!r}: must be {RULES[name]}: {error}") from error
