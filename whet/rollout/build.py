"""make_engine and make_sampling: from a configuration to an engine and its sampling parameters."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from whet.config import RolloutConfig
from whet.errors import ConfigError
from whet.models.loaded_model import LoadedModel
from whet.models.prompt_tuning import is_prompt_tuned
from whet.rollout.base import Constraint, RolloutEngine, Sampling
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.generate_options import freeze_options, validate_options

__all__ = ["describe_engine", "final_engine", "make_engine", "make_grammars", "make_sampling"]

log = logging.getLogger("whet")


def make_sampling(config: RolloutConfig, eos_ids: Sequence[int], tokenizer: Any = None) -> Sampling:
    """Returns the sampling parameters of a rollout configuration.

    Args:
        config: of a mode; its `eos_tokens` replace eos_ids.
        eos_ids: end ids of tokenizer and model.
        tokenizer: checks the stop strings; None = they are not checked.
    Raises: ConfigError: a stop string with a special token in it.
    """
    stop_ids = tuple(config.eos_tokens or eos_ids)
    if tokenizer is not None:
        _check_stop_strings(config.stop, stop_ids, tokenizer)
    return Sampling(
        max_tokens=config.max_tokens_to_generate,
        min_tokens=config.min_tokens,
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=max(config.top_k or 0, 0),
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        stop_ids=stop_ids,
        stop=tuple(config.stop),
        forbidden_ids=tuple(config.forbidden_tokens),
        constraint=None if (c := config.constraint) is None else Constraint(kind=c.kind, text=c.text),
        logprobs_mode=config.logprobs_mode,
        generation_kwargs=freeze_options(config.generation_kwargs),
    )


def _check_stop_strings(strings: Sequence[str], stop_ids: Sequence[int], tokenizer: Any) -> None:
    """Raises ConfigError for a stop string with a special token: the text that is searched has none."""
    for string in strings:
        for i in tokenizer(string, add_special_tokens=False).input_ids:
            token, visible = (str(tokenizer.decode([i], skip_special_tokens=skip)) for skip in (False, True))
            if token != visible and token in string:
                raise ConfigError(
                    f"stop={string!r}: {token!r} is a special token, which the decoded text leaves out, so the string "
                    "would never be found; leave it out and put the token's id into rollout.eos_tokens "
                    f"(Sampling.stop_ids): {sorted({*stop_ids, int(i)})}"
                )


def final_engine(
    spec: Any, loaded: LoadedModel, samplings: Sequence[Sampling] = (), generation_kwargs: Iterable[str] = ()
) -> Any:
    """Returns "hf" where "embedded" can't do what is asked for; the reason is logged. Args: as of `make_engine`.

    Raises: ConfigError: options that transformers does not have.
    """
    if spec == "embedded" and not loaded.packable:
        log.warning(
            "rollout_engine 'embedded' can't run this model (%s); using 'hf'", "; ".join(loaded.unpackable_reasons)
        )
        spec = "hf"
    if names := sorted({*generation_kwargs, *(name for s in samplings for name, _ in s.generation_kwargs)}):
        validate_options(dict.fromkeys(names))
        if spec == "embedded":
            log.warning("generation_kwargs (%s) are transformers' own; using 'hf'", ", ".join(names))
            spec = "hf"
    return spec


def make_engine(
    spec: Any,
    loaded: LoadedModel,
    *,
    config: RolloutConfig,
    decode: Callable[[Sequence[int]], str],
    tokenizer: Any,
    samplings: Sequence[Sampling] = (),
    generation_kwargs: Iterable[str] = (),
    grammars: Grammars | None = None,
) -> RolloutEngine:
    """Returns the engine of a cluster.

    Args:
        spec: a name from ENGINES, "package.module:Class", a class or a partial. A class with the classmethod
            `from_config(config, model, *, decode, grammars, samplings)` is built by it, another engine class as
            cls(model, decode=...).
        loaded: the policy.
        config: of the rollout.
        decode: ids -> text.
        samplings: the Sampling of each mode; vLLM's and SGLang's adapters check them now.
        generation_kwargs: names of further options of transformers that requests will have.
        grammars: of the tokenizer, where the caller has them already.
    Returns: the engine. "embedded" becomes "hf" where the model can't take whet's attention layout, or where options of
        transformers are asked for; the reason is logged.
    """
    from whet.rollout import resolve_engine

    spec = final_engine(spec, loaded, samplings, generation_kwargs)
    if spec in ("vllm", "sglang") and is_prompt_tuned(loaded.module):
        raise ConfigError(
            f"rollout_engine {spec!r} can't read the model's learned prompt (PEFT's prompt tuning); set "
            "rollout_engine=embedded, which becomes 'hf' here"
        )
    _warn_unused(spec, config)
    engine_class: Any = resolve_engine(spec)
    cls = engine_class.func if isinstance(engine_class, functools.partial) else engine_class
    if inspect.isclass(cls) and not callable(inspect.getattr_static(cls, "submit", None)):
        raise ConfigError(
            f"the engine {cls.__name__} has no submit; derive it from SimpleEngine, where you write only complete; "
            "whet.tunix.RLCluster takes a class with Tunix's generate"
        )
    from_config = getattr(engine_class, "from_config", None)
    if from_config is not None:
        grammars = grammars or make_grammars(loaded, tokenizer)
        engine = from_config(config, loaded, decode=decode, grammars=grammars, samplings=samplings)
    else:
        engine = engine_class(loaded, decode=decode)
    if missing := [n for n in dir(RolloutEngine) if n[0] != "_" and not hasattr(engine, n)]:
        raise ConfigError(
            f"the engine {type(engine).__name__} has no {', '.join(missing)}; derive it from SimpleEngine, where you "
            "write only complete, or from QueueEngine, where you write only step (whet.rollout.queue_engine)"
        )
    if config.kv_cache_tokens is not None and engine.stats().kv_tokens_bound is None:
        log.warning(
            "rollout.kv_cache_tokens=%d has no effect: this engine does not bound its cache", config.kv_cache_tokens
        )
    return engine


def _warn_unused(spec: Any, config: RolloutConfig) -> None:
    """Warns about fields of another engine that are set; a user's own class may read all of them."""
    if not isinstance(spec, str) or ":" in spec:
        return
    unused = {}
    for section in {"vllm", "sglang"} - {spec}:
        values, defaults = vars(vars(config)[section]), vars(type(vars(config)[section])())
        unused |= {f"{section}.{n}": v for n, v in values.items() if v != defaults[n]}
    if unused:
        fields = ", ".join(f"rollout.{name}={value!r}" for name, value in unused.items())
        log.warning("%s: no effect with rollout_engine %r, they belong to another engine; leave them out", fields, spec)


def make_grammars(loaded: LoadedModel, tokenizer: Any) -> Grammars:
    """Returns the grammars of a model's tokenizer; nothing is compiled before the first constraint."""
    return Grammars(tokenizer, vocabulary=loaded.num_ids)


def describe_engine(engine: RolloutEngine) -> dict[str, str]:
    """Returns an engine's class and the implementation of its parts, for environment.json."""
    return {"engine": type(engine).__name__, **engine.backends}
