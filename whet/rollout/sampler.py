"""Sampler: text in, text out, from a model that is not being trained.

It has a model and its tokenizer, is called with texts or chats, and shares its code with RLCluster.generate. The
embedded engine runs it; the hf engine where the model can't take whet's attention, or for transformers' own options
and beams.
Left out on purpose: images and audio, and engines of other packages.
Dim legend: N completions (prompts times num_generations), P prompt, C completion, V vocabulary.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from whet.config import RolloutConfig
from whet.config.base import check_keywords
from whet.config.synonyms import find_owner
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from whet.errors import ConfigError, DataError, EngineError, lookup_error
from whet.models.config_sizes import read_width
from whet.models.load import check_device, load_model
from whet.models.loaded_model import LoadedModel
from whet.models.model_factory import call_model_factory
from whet.models.modes import max_positions
from whet.models.precision import auto_dtype
from whet.observe.environment import trained_dtype
from whet.rollout.auto_engine import AUTO, choose_engine
from whet.rollout.base import PartialOutput, Request, RolloutEngine, Sampling
from whet.rollout.build import make_engine, make_sampling
from whet.rollout.driver import Episode, RolloutDriver, Turns, single_turns, stream
from whet.rollout.generate_options import num_beams, validate_options
from whet.rollout.text import as_batch, encode_prompts, pad_left
from whet.storage.model_paths import model_folder
from whet.types import Group, Message, Prompt
from whet.util.references import is_ref

__all__ = ["Sampler", "SamplerOutput"]

log = logging.getLogger("whet")

MAX_NEW_TOKENS = 256
"""Tokens of a completion without a given length, if the model has room."""
OPTIONS = (
    "constraint",
    "generation_kwargs",
    "logprobs_mode",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop",
)
"""Fields of RolloutConfig that a call may set besides its named arguments."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerOutput:
    """A Sampler's result: an entry for each completion, the generations of a prompt one after the other."""

    text: list[str]
    """Without special tokens; with echo, after the prompt's text."""
    tokens: list[np.ndarray] | np.ndarray
    """int32 [C] each, stop token included; with echo, after the prompt's. With pad_output [N, C], padded right."""
    logprobs: list[np.ndarray] | np.ndarray | None
    """float32 [C] each (with pad_output [N, C], zeros at the end), only of the completion; on request."""
    logits: list[np.ndarray] | np.ndarray | None
    """float32 [C, V] each (with pad_output [N, C, V]), only of the completion; on request."""
    padded_prompt_tokens: np.ndarray
    """int32 [N, P], padded on the left."""
    finish_reason: list[str]
    """"stop" or "length"."""
    seed: int
    """Seed of the draws: the same seed draws the same."""


class Sampler:
    """Completes texts and chats.

    Args:
        transformer: a module of transformers, a LoadedModel, a folder (of a model, a finished run, or a checkpoint), a
            hub name, or "file.py:function", which makes the model as in a run (with seed 0).
        tokenizer: a tokenizer, a folder, a hub name; None = where the model lies.
        max_length: most tokens of a prompt and its completion together; None = the model's positions.
        rollout_engine: "embedded", "hf" or what ClusterConfig takes.
        dtype: of a model that is read: "float32", "bfloat16", or "auto" = that of the run in whose folder it lies, else
            as RoleConfig.dtype has it.
        device: of a model that is read; None = the GPU if there is one.
        max_batch_size: as in RolloutConfig.
        kv_cache_tokens: as in RolloutConfig.
        chat_template_kwargs: further arguments of the chat template.
        rollout_config: what the engine is made of, in place of max_batch_size and kv_cache_tokens.
    Raises: ConfigError: no model or tokenizer there, or one that can't generate.
    Source: the call of Tunix's Sampler. Unlike there, two calls without a seed draw differently, the end token stays,
        logprobs are of the distribution drawn from, a long prompt is refused or truncated as asked, and a batch of one
        is a batch.

    >>> from whet.demo import small_model
    >>> sampler = Sampler(small_model(seed=0), "byte")
    >>> out = sampler(["2+2=", "7*3="], max_tokens=4, temperature=1.0, seed=1, num_generations=2)
    >>> again = sampler("2+2=", 4, temperature=1.0, seed=1)
    >>> len(out.text), out.seed, out.tokens[0].tolist() == again.tokens[0].tolist()
    (4, 1, True)
    """

    @check_keywords
    def __init__(
        self,
        transformer: nn.Module | LoadedModel | str | Path,
        tokenizer: Any = None,
        max_length: int | None = None,
        *,
        rollout_engine: Any = "embedded",
        dtype: str = "auto",
        device: str | torch.device | None = None,
        max_batch_size: int = 256,
        kv_cache_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rollout_config: RolloutConfig | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if tokenizer is None and not isinstance(transformer, str | Path):
            raise ConfigError("a module has no tokenizer; pass tokenizer=: a tokenizer, a folder or a hub name")
        self._factory_folder: tempfile.TemporaryDirectory[str] | None = None
        if isinstance(transformer, str) and is_ref(transformer):
            self._factory_folder = tempfile.TemporaryDirectory(prefix="whet-model-", ignore_cleanup_errors=True)
            transformer = call_model_factory(transformer, self._factory_folder.name, 0)
        folder = str(transformer) if isinstance(transformer, str | Path) else None
        self.tokenizer = load_tokenizer(folder if tokenizer is None else tokenizer, trust_remote_code=trust_remote_code)
        self.loaded = (
            transformer
            if isinstance(transformer, LoadedModel)
            else _load(folder, transformer, dtype, device, trust_remote_code)
        )
        module = self.loaded.module
        self.eos_ids = stop_token_ids(self.tokenizer, module.config, module.generation_config)
        self.pad_id = pad_token_id(self.tokenizer, self.eos_ids)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        positions = max_positions(module)
        bounds = [bound for bound in (positions, max_length) if bound is not None]
        self.longest = min(bounds) if bounds else None
        """The most tokens of a prompt and its completion together; None = no bound."""
        sizes = {"max_batch_size": max_batch_size, "kv_cache_tokens": kv_cache_tokens}
        self._engine_config = rollout_config or RolloutConfig(**sizes)
        if rollout_engine == AUTO:
            rollout_engine = choose_engine(self._engine_config, device=self.loaded.module.device)
        self._spec = rollout_engine
        self._engines: dict[str, RolloutEngine] = {}
        self._closed = False
        self._next_id = self._version = 0
        self.engine(Sampling())

    def engine(self, sampling: Sampling) -> RolloutEngine:
        """Returns the engine that runs a Sampling: the chosen one, or "hf" for transformers' own options."""
        if self._closed:
            raise EngineError("this Sampler is closed; make another")
        options = [name for name, _ in sampling.generation_kwargs]
        kind = "options" if options and self._spec == "embedded" else "own"
        if kind not in self._engines:
            self._engines[kind] = make_engine(
                self._spec,
                self.loaded,
                config=self._engine_config,
                decode=self.decode,
                tokenizer=self.tokenizer,
                generation_kwargs=options,
            )
        return self._engines[kind]

    @property
    def engines(self) -> tuple[RolloutEngine, ...]:
        """The engines made so far."""
        return tuple(self._engines.values())

    def decode(self, ids: Any) -> str:
        """Returns the text of ids, special tokens left out."""
        return str(self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    # ---- the call ------------------------------------------------------------------------------------------------

    def __call__(
        self,
        input_strings: str | Sequence[str] | list[Message] | Sequence[list[Message]],
        max_tokens: int | None = None,
        max_prompt_length: int | None = None,
        echo: bool = False,
        return_logits: bool = False,
        eos_tokens: Sequence[int] | None = None,
        forbidden_tokens: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | None = None,
        pad_output: bool = False,
        return_logprobs: bool = False,
        *,
        num_generations: int = 1,
        apply_chat_template: bool = False,
        on_long_prompt: str = "error",
        **options: Any,
    ) -> SamplerOutput:
        """Completes texts or chats, or a single one of either.

        Args:
            input_strings: texts, or lists of messages, which take the chat template.
            max_tokens: the longest completion; None = 256, or the rest of the context length.
            max_prompt_length: tokens; None = what the model takes.
            echo: text and tokens begin with the prompt's.
            temperature: as in RolloutConfig.
            top_p: as in RolloutConfig.
            top_k: as in RolloutConfig.
            forbidden_tokens: as in RolloutConfig.
            eos_tokens: as in RolloutConfig; None = the model's.
            beam_size: beams to search with; num_generations gives the best of them.
            seed: of the draws; None = another for each call.
            pad_output: pad arrays to the longest completion.
            return_logits: fill this field of SamplerOutput.
            return_logprobs: fill this field of SamplerOutput.
            num_generations: completions of each prompt.
            apply_chat_template: for texts too.
            on_long_prompt: "error" or "truncate_left".
            options: min_p, repetition_penalty, min_tokens, stop, constraint, logprobs_mode, generation_kwargs.
        Raises: ConfigError: options that are unknown or contradict each other. DataError: a prompt that is too long.
        """
        sampling = self.sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            eos_tokens=eos_tokens,
            forbidden_tokens=forbidden_tokens,
            beam_size=beam_size,
            return_logits=return_logits,
            **options,
        )
        prompts = self.encode(
            input_strings,
            apply_chat_template=apply_chat_template,
            max_prompt_length=max_prompt_length,
            on_long_prompt=on_long_prompt,
        )
        seed = secrets.randbits(31) if seed is None else seed
        each = self.limit_lengths(sampling, prompts, fixed=max_tokens is not None)
        groups = self.sample(prompts, each, num_generations=num_generations, seed=seed)
        completions = [c for g in groups for c in g.completions]
        prompt_tokens = [g.prompt.tokens for g in groups for _ in g.completions]
        tokens = [c.tokens for c in completions]
        if echo:
            tokens = [np.concatenate([p, c]) for p, c in zip(prompt_tokens, tokens, strict=True)]
        fill: Any = lambda rows, value: _padded(rows, value) if pad_output else rows
        return SamplerOutput(
            text=[self.decode(t) for t in tokens],
            tokens=fill(tokens, self.pad_id),
            logprobs=fill([c.logprobs for c in completions], 0.0) if return_logprobs else None,
            logits=fill([c.logits for c in completions], 0.0) if return_logits else None,
            padded_prompt_tokens=pad_left(prompt_tokens, self.pad_id),
            finish_reason=[c.finish_reason for c in completions],
            seed=seed,
        )

    # ---- the steps of a call -------------------------------------------------------------------------------------

    def sampling(
        self,
        *,
        max_tokens: int | None = None,
        beam_size: int | None = None,
        return_logits: bool = False,
        **options: Any,
    ) -> Sampling:
        """Returns the checked sampling parameters of a call: its arguments, without those of prompts and output.

        Raises: ConfigError: an unknown option, one out of its range, or two that contradict each other.
        """
        defaults = {"temperature": 0.0, "top_p": None, "top_k": None, "eos_tokens": None, "forbidden_tokens": None}
        for name in options.keys() - defaults.keys():
            if name not in OPTIONS:
                choices = [*defaults, *OPTIONS, "max_tokens", "beam_size"]
                if (owner := find_owner(name, {*choices, "num_generations"})) is not None:
                    raise ConfigError(f"unknown sampling option {name!r}; did you mean {owner}?")
                raise lookup_error("sampling option", name, choices)
        settings = {**defaults, **options}
        kwargs = dict(settings.pop("generation_kwargs", {}))
        if beam_size is not None:
            if "num_beams" in kwargs:
                raise ConfigError("beam_size and generation_kwargs' num_beams are the same option; keep one")
            kwargs["num_beams"] = beam_size
        validate_options(dict.fromkeys(kwargs))
        for name in ("eos_tokens", "forbidden_tokens"):
            settings[name] = None if settings[name] is None else tuple(settings[name])
        settings["forbidden_tokens"] = settings["forbidden_tokens"] or ()
        for name in ("top_p", "top_k", "min_p"):
            if settings["temperature"] == 0 and settings.get(name) not in (None, 0, 1.0, -1):
                raise ConfigError(
                    f"temperature=0.0 takes the likeliest token, so {name}={settings[name]} would do nothing; set a "
                    "temperature above 0"
                )
        config = RolloutConfig(
            max_tokens_to_generate=MAX_NEW_TOKENS if max_tokens is None else max_tokens,
            generation_kwargs=kwargs,
            **settings,
        )
        return replace(make_sampling(config, self.eos_ids, self.tokenizer), return_logits=return_logits)

    def encode(
        self,
        inputs: Any,
        *,
        apply_chat_template: bool = False,
        max_prompt_length: int | None = None,
        on_long_prompt: str = "error",
    ) -> list[Prompt]:
        """Texts or chats, or a single one, as Prompts: see the call. Raises DataError where one is too long."""
        if on_long_prompt not in ("error", "truncate_left"):
            raise lookup_error("on_long_prompt", on_long_prompt, ("error", "truncate_left"))
        encoder = self.encoder(
            apply_chat_template=apply_chat_template,
            max_prompt_length=max_prompt_length,
            on_long_prompt=on_long_prompt,
        )
        return encode_prompts(encoder, as_batch(inputs))

    def encoder(self, **options: Any) -> PromptEncoder:
        """Returns the encoder of rows with a prompt; `options` are PromptEncoder's.

        Nothing is trained, so any rendering of a chat template is accepted, and an assistant's turn at the end is
        continued.
        """
        defaults = {
            "chat_template_kwargs": self.chat_template_kwargs,
            "on_template_change": "accept",
            "on_answered": "continue",
        }
        return PromptEncoder(self.tokenizer, **{**defaults, **options})

    def limit_lengths(self, sampling: Sampling, prompts: Sequence[Prompt], *, fixed: bool = True) -> list[Sampling]:
        """Returns the sampling parameters of each prompt, with max_tokens lowered to the room that the prompt leaves.

        Args: fixed: the caller set max_tokens, so it is an error if a prompt leaves less room.
        Raises: DataError: prompt and completion are longer than the model or the cache allows, with the numbers.
        """
        if self.longest is None:
            return [sampling] * len(prompts)
        longest = max(prompts, key=lambda p: len(p.tokens))
        length = len(longest.tokens)
        new_tokens = sampling.max_tokens if fixed else max(1, sampling.min_tokens)
        if length + new_tokens > self.longest:
            best_limit = max(1, self.longest - new_tokens)
            raise DataError(
                f"prompt {longest.row} has {length} tokens; with {new_tokens} new ones that is {length + new_tokens}, "
                f"over the limit of {self.longest}; shorten the prompt (max_prompt_length={best_limit} with "
                "on_long_prompt='truncate_left'), or ask for fewer new tokens"
            )
        rooms = [self.longest - len(p.tokens) for p in prompts]
        return [sampling if sampling.max_tokens <= r else replace(sampling, max_tokens=r) for r in rooms]

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling],
        *,
        num_generations: int = 1,
        seed: int,
        first: int = 0,
        run_episode: Callable[[Episode, Sampling], Turns] | None = None,
    ) -> list[Group]:
        """Completes prompts, ids in and ids out.

        Args:
            prompts: encoded.
            sampling: of all prompts, or of each, as `limit_lengths` returns them: they may differ in max_tokens.
            seed: with a prompt's place and the generation, the key of its draws.
            first: index of the first prompt, so that a list in several calls draws as in one.
            run_episode: the generator function of an episode of several turns; None = one completion.
        Returns: a group for each prompt.
        """
        first_sampling = sampling if isinstance(sampling, Sampling) else sampling[0]
        if num_generations > 1 and first_sampling.temperature == 0 and num_beams(first_sampling) == 1:
            raise ConfigError(
                f"temperature=0.0 takes the likeliest token, so {num_generations} generations would all be the "
                "same; set a temperature above 0"
            )
        rollouts = RolloutDriver(self.engine(first_sampling), next_id=self._next_id)
        episodes = single_turns(prompts, sampling, num_generations=num_generations, rng_key=(seed, 0, first))
        if run_episode is not None:
            for episode in episodes:
                episode.run = lambda e: run_episode(e, first_sampling)
        try:
            return rollouts.run(episodes)
        finally:
            self._next_id = rollouts.next_id
            rollouts.close()

    def stream(
        self, prompt: Prompt, sampling: Sampling, *, seed: int | None, place: int = 0, conversation: int | None = None
    ) -> Iterator[PartialOutput]:
        """Returns the tokens of one completion, as they are drawn; leaving the loop early aborts it.

        Args:
            prompt: encoded.
            seed: the key of its draws, with place; None = another each time.
            place: as in `sample`.
            conversation: calls with one number continue each other, so that an engine can reuse the KV.
        Returns: PartialOutputs; the last has the finish_reason.
        """
        self._next_id += 1
        request = Request(
            id=self._next_id - 1,
            tokens=prompt.tokens,
            sampling=sampling,
            group=self._next_id - 1,
            rng_key=(secrets.randbits(31) if seed is None else seed, 0, place, 0),
            conversation=conversation,
        )
        return stream(self.engine(sampling), [request])

    # ---- weights and end -----------------------------------------------------------------------------------------

    @property
    def transformer_state(self) -> dict[str, Tensor]:
        """The model's parameters and buffers by name. Setting it copies tensors of the same names and shapes."""
        return self.loaded.module.state_dict()

    @transformer_state.setter
    def transformer_state(self, state: Mapping[str, Tensor]) -> None:
        current = self.transformer_state
        wrong = [f"{n} is missing" for n in current.keys() - state.keys()]
        wrong += [f"{n} is unknown" for n in state.keys() - current.keys()]
        wrong += [
            f"{n} is {state[n].dtype} {list(state[n].shape)}, not {current[n].dtype} {list(current[n].shape)}"
            for n in current.keys() & state.keys()
            if (state[n].shape, state[n].dtype) != (current[n].shape, current[n].dtype)
        ]
        if wrong:
            raise ConfigError(f"transformer_state does not fit this model: {'; '.join(sorted(wrong)[:4])}")
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(state[name])
        self._version += 1
        for engine in self._engines.values():
            engine.update_weights(self._version, None if engine.caps.shared_weights else iter(current.items()))

    def close(self) -> None:
        """Frees the engines' memory; nothing can be drawn after."""
        self._closed = True
        for engine in self._engines.values():
            engine.close()
        if self._factory_folder is not None:
            self._factory_folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load(
    folder: str | None, module: Any, dtype: str, device: str | torch.device | None, trust_remote_code: bool
) -> LoadedModel:
    """Returns a loaded model, without gradients; a module is taken as it is."""
    if folder is None:
        return load_model(module, device=next(module.parameters()).device)
    torch_device = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if dtype == "auto":
        width = read_width(folder, trust_remote_code) or 0
        dtype = trained_dtype(model_folder(folder)) or str(auto_dtype(torch_device, width)).removeprefix("torch.")
    return load_model(folder, dtype=dtype, device=torch_device, role="reference", trust_remote_code=trust_remote_code)


def _padded(rows: Sequence[np.ndarray], value: float) -> np.ndarray:
    """Returns rows padded on the right to the longest: [N, C, ...]."""
    out = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), value, rows[0].dtype)
    for i, r in enumerate(rows):
        out[i, : len(r)] = r
    return out
