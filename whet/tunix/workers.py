"""Tunix's workers: the rollout, which samples, and the inference worker, which holds the models that are not trained.

Dim legend: B rows, P prompt, C completion, T = P + C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from whet.config import Role
from whet.data.prompts import PromptEncoder
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, lookup_error
from whet.rollout import sampler
from whet.rollout.base import RolloutEngine, Sampling
from whet.rollout.build import make_sampling
from whet.rollout.text import as_batch, encode_prompts
from whet.tunix.base_rollout import TokenizerAdapter
from whet.tunix.common import compute_per_token_logps, compute_score
from whet.tunix.configs import CacheConfig, RolloutConfig
from whet.tunix.length_aliases import accepts_length_aliases
from whet.tunix.padded import RolloutOutput, rollout_output

__all__ = [
    "ClusterInference",
    "InferenceWorker",
    "RolloutWorker",
    "Sampler",
    "Tokenizer",
    "VanillaRollout",
    "inner_tokenizer",
]

_ROLES = ("critic", "reference", "reward")


def inner_tokenizer(tokenizer: Any) -> Any:
    """Returns the tokenizer inside a TokenizerAdapter; any other as it is."""
    return tokenizer.tokenizer if isinstance(tokenizer, TokenizerAdapter) else tokenizer


class Sampler(sampler.Sampler):
    """whet.Sampler with a CacheConfig, which bounds a prompt and its completion; None = the model's positions.

    Args: options: the other arguments of whet.Sampler.
    """

    def __init__(
        self, transformer: Any, tokenizer: Any = None, cache_config: CacheConfig | None = None, **options: Any
    ) -> None:
        longest = None if cache_config is None else cache_config.cache_size
        super().__init__(transformer, inner_tokenizer(tokenizer), longest, **options)

    @accepts_length_aliases("max_tokens")
    def __call__(self, *args: Any, **options: Any) -> sampler.SamplerOutput:
        """Completes texts or chats as whet.Sampler does; max_generation_steps is max_tokens."""
        return super().__call__(*args, **options)

    @accepts_length_aliases("max_tokens")
    def sampling(self, **options: Any) -> Sampling:
        """Returns the checked sampling parameters of a call, as of whet.Sampler; max_generation_steps is max_tokens."""
        return super().sampling(**options)


class VanillaRollout:
    """Samples from a model that it does not train, with the methods of Tunix's rollout class.

    Args: model: a module of transformers, a folder or a hub name. tokenizer: a tokenizer, a folder or a hub name; None
        = the model's folder. cache_config_or_size: the most tokens of a prompt and its completion together.

    >>> from whet.demo import small_model
    >>> rollout = VanillaRollout(small_model(seed=0), "byte", 64)
    >>> out = rollout.generate(["2+2="], RolloutConfig(max_tokens_to_generate=4, seed=1))
    >>> rollout.get_per_token_logps(out.left_padded_prompt_tokens, out.tokens).shape == (1, len(out.tokens[0]))
    True
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, cache_config_or_size: CacheConfig | int | None = None
    ) -> None:
        size = cache_config_or_size
        self._cache = CacheConfig(cache_size=size) if isinstance(size, int) else size
        self._sampler = Sampler(model, tokenizer, self._cache)

    def generate(self, prompts: Sequence[str], rollout_config: RolloutConfig, **options: Any) -> RolloutOutput:
        """Returns a completion of each prompt. Args: options: of Sampler's call, in place of the configuration's."""
        c = rollout_config
        defaults = {
            "max_generation_steps": c.max_tokens_to_generate,
            "max_prompt_length": c.max_prompt_length,
            "temperature": c.temperature,
            "top_p": c.top_p,
            "top_k": c.top_k,
            "seed": c.seed,
            "eos_tokens": c.eos_tokens,
            "return_logprobs": c.return_logprobs,
        }
        out = self._sampler(list(prompts), **{**defaults, **options})
        return RolloutOutput(
            text=out.text,
            logits=out.logits,  # pyright: ignore[reportArgumentType]
            tokens=list(out.tokens),
            left_padded_prompt_tokens=out.padded_prompt_tokens,
            logprobs=out.logprobs,  # pyright: ignore[reportArgumentType]
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Tensor:
        """Returns the log-probabilities of completions, temperature 1, without gradient: [B, C]."""
        logprobs = compute_per_token_logps(self.model(), prompt_tokens, completion_tokens, self.pad_id(), self.eos_id())
        assert isinstance(logprobs, Tensor)
        return logprobs

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes weights by name: a state dict or pairs. Args: filter_types: no effect: the names choose the parameters.

        Raises: ConfigError: a name that the model does not have.
        """
        weights = dict(params.items() if isinstance(params, Mapping) else params)
        known = self.model().state_dict().keys()
        if wrong := [name for name in weights if name not in known]:
            raise lookup_error("parameter of the model", wrong[0], list(known))
        self.model().load_state_dict(weights, strict=False)
        previous = self._sampler
        self._sampler = Sampler(previous.loaded, previous.tokenizer, self._cache)
        previous.close()

    def pad_id(self) -> int:
        """Returns the padding id."""
        return self._sampler.pad_id

    def eos_id(self) -> int:
        """Returns the id that ends a completion."""
        return self._sampler.eos_ids[0]

    def model(self) -> nn.Module:
        """Returns the module."""
        return self._sampler.loaded.module


class RolloutWorker:
    """A cluster's engine with the methods of Tunix's rollout class; everything else is the engine's own.

    Args: cluster: the cluster of the engine.
    """

    def __init__(self, cluster: Any, engine: RolloutEngine) -> None:
        self._cluster, self.engine = cluster, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig | None = None, **options: Any
    ) -> RolloutOutput:
        """Returns a completion of each prompt by the actor. Args: rollout_config: None = training's. options: of
        RLCluster.generate, where there is no configuration.
        """
        cluster, c = self._cluster, rollout_config
        if c is None:
            return cluster.generate(list(prompts), **options)
        encoder = PromptEncoder.from_config(cluster.tokenizer, c, on_template_change="accept", on_answered="continue")
        groups = cluster.sample(
            encode_prompts(encoder, as_batch(list(prompts))),
            step=cluster.next_call() if c.seed is None else 0,
            mode="generate",
            sampling=make_sampling(c, cluster.eos_ids, cluster.tokenizer),
            seed=c.seed,
        )
        return rollout_output(groups, cluster.decode, cluster.pad_id, logprobs=c.return_logprobs)

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Tensor:
        """Returns the log-probabilities under the policy that rolls out: [B, C], 0 at padding."""
        return self._cluster.get_old_per_token_logps(prompt_tokens, completion_tokens)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Raises ConfigError: the engine reads the trainer's own weights."""
        raise ConfigError("the rollout takes the actor's weights: train the actor, and call sync_weights()")

    def pad_id(self) -> int:
        """Returns the padding id."""
        return self._cluster.pad_id

    def eos_id(self) -> int:
        """Returns the id that ends a completion."""
        return self._cluster.eos_ids[0]

    def model(self) -> nn.Module:
        """Returns the actor's module."""
        return self._cluster.actor.loaded.module


class InferenceWorker:
    """The models that are not trained here: critic, reference and reward.

    Args: models: by role; causal models for the reference, token or sequence classifiers of one label for the others.
    Raises: ConfigError: another role.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        if wrong := [name for name in models if name not in _ROLES]:
            raise lookup_error("role of an InferenceWorker", wrong[0], _ROLES)
        self._models = dict(models)

    def get_model(self, role: str) -> nn.Module:
        """Returns the model of a role. Raises ConfigError: there is none."""
        if role not in self._models:
            known = ", ".join(self._models) or "none"
            raise ConfigError(f"the model of the role {role!r} is not available; there are: {known}")
        return self._models[role]

    def get_rewards(self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int) -> Tensor:
        """Returns the reward model's score at each token: [B, T]."""
        return compute_score(self.get_model("reward"), prompt_tokens, completion_tokens, pad_id, eos_id)

    def get_values(self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int) -> Tensor:
        """Returns the critic's score at each token: [B, T]."""
        return compute_score(self.get_model("critic"), prompt_tokens, completion_tokens, pad_id, eos_id)

    compute_rewards, compute_values = get_rewards, get_values

    def get_ref_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int, temperature: float = 1.0
    ) -> Tensor:
        """Returns the log-probabilities under the reference: [B, C]."""
        model = self.get_model("reference")
        logprobs = compute_per_token_logps(
            model, prompt_tokens, completion_tokens, pad_id, eos_id, temperature=temperature
        )
        assert isinstance(logprobs, Tensor)
        return logprobs

    def update_model(self, role: str, params: Any) -> None:
        """Loads weights by name into a model."""
        self.get_model(role).load_state_dict(dict(params), strict=False)


class ClusterInference(InferenceWorker):
    """InferenceWorker of a cluster's models, run by its workers: values at completion tokens, [B, C], 0 at padding."""

    def __init__(self, cluster: Any) -> None:
        roles = (role for role in (Role.CRITIC, Role.REFERENCE, Role.REWARD) if role in cluster.workers)
        super().__init__({role.value: cluster.worker(role).loaded.module for role in roles})
        self._cluster = cluster

    def get_rewards(self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int) -> Tensor:
        """Returns the reward model's score of each row: [B]."""
        return self._cluster.get_rewards(prompt_tokens, completion_tokens, pad_id, eos_id)

    def get_values(self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int) -> Tensor:
        """Returns the critic's values of the states before each completion token: [B, C], 0 at padding."""
        return self._cluster.get_values(prompt_tokens, completion_tokens, pad_id, eos_id)

    compute_rewards, compute_values = get_rewards, get_values

    def get_ref_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, pad_id: int, eos_id: int, temperature: float | None = None
    ) -> Tensor:
        """Returns the log-probabilities under the reference, of the sampling distribution: [B, C]."""
        return self._cluster.per_token_logps(
            Role.REFERENCE, prompt_tokens, completion_tokens, pad_id, eos_id, temperature=temperature
        )

    def update_model(self, role: str, params: Any) -> None:
        """Raises ConfigError: a cluster's models are loaded with it."""
        raise ConfigError(
            f"the {role} of a cluster is set when the cluster is built, and changed by sync_ref_model only"
        )


def Tokenizer(tokenizer_type: str = "huggingface", tokenizer_path: str = "", **options: Any) -> Any:
    """Returns a tokenizer of transformers, from a folder or a hub name. Raises ConfigError: another type, or other
    options.
    """
    if tokenizer_type != "huggingface":
        raise ConfigError(
            f"tokenizer_type {tokenizer_type!r}: tokenizers are transformers' own; give a folder with one"
        )
    if named := [name for name, value in options.items() if value is not None]:
        raise ConfigError(
            f"Tokenizer({named[0]}=...) is not supported: the tokenizer's folder defines it; leave it out"
        )
    return load_tokenizer(tokenizer_path)
