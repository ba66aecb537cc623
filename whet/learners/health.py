"""Health: warns of a run that goes wrong, each thing once, and again where it got worse. It changes nothing.

The symptoms that a row of metrics shows are those of symptoms.py; here is what has to look at rewards, batch and
sampler: why nothing is learned, and whether the policy is certain of everything or of nothing. What is remembered from
step to step is a few numbers, which a checkpoint holds, so that a resumed run warns where the uninterrupted one would.
Left out on purpose: what is judged over a window or by a trend; that is the reader's business. Gradients that are not
finite are the RoleTrainer's, which ends a run of them.

Dim letters: J trajectories.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from whet.cluster import RLCluster
from whet.config import Mode, Role
from whet.config.monitoring import Band
from whet.data.templates import uses_chat_template
from whet.errors import nearest
from whet.learners.symptoms import FULL, RAISE, apart, symptoms, truncated
from whet.models.modes import max_positions
from whet.ops import Support
from whet.train.role_trainer import lower_lr_advice
from whet.types import TokenBatch

if TYPE_CHECKING:
    from whet.rewards.reward_batch import RewardBatch

__all__ = ["Health", "most_choices"]

log = logging.getLogger("whet")

LONGER = 10
"""What lasts so many times as long as when it was said got worse."""
FIRST = {"signal": 3, "gradient": 10, "certain": 10, "even": 10}
"""Steps in a row, of each thing that is watched, before the first warning."""
MISSING = 3
"""Steps after which it is said that none had a metric of trainer.warn_when."""
CERTAIN = 1e-4
"""Mean entropy, in nats, below which all completions of a prompt are almost surely the same."""
EVEN = 1e-3
"""A policy samples uniformly where its mean entropy is below the maximum by less than this share of it."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is watched of a step."""

    step: int
    row: Mapping[str, float]
    rewards: RewardBatch
    batch: TokenBatch

    @property
    def signal(self) -> bool:
        """Whether a token is trained whose advantage is not 0."""
        batch = self.batch
        if batch.advantages is None:
            return bool(batch.mask.any() and self.rewards.have_spread.any())
        return bool(((batch.advantages != 0) & batch.mask).any())


class Health:
    """Watches the steps of a run.

    Args: cluster: whose run it is. of_rewards: something is learned only where a token has an advantage. bands: of
        metrics, trainer.warn_when. templated: texts go through the chat template too.

    Example: health.watch(step, row, rewarded, batch) after each step; health.state() into the checkpoint.
    """

    def __init__(
        self,
        cluster: RLCluster,
        *,
        of_rewards: bool = True,
        bands: Mapping[str, Band] | None = None,
        templated: bool = False,
    ) -> None:
        self.cluster = cluster
        self.of_rewards = of_rewards
        self.templated = templated
        self.symptoms = symptoms(bands)
        self._unseen = set(bands or {})
        """Metrics of bands that no row has had."""
        self._since: dict[str, tuple[int, int]] = {}
        """Of what is wrong: the first step, and how many rows have shown it."""
        self._badness: dict[str, float] = {}
        """How bad it was when it was said."""

    def watch(self, step: int, row: Mapping[str, float], rewarded: RewardBatch, batch: TokenBatch) -> None:
        """Warns of what has lasted for too long.

        Args:
            step: the one just finished.
            row: its metrics.
            rewarded, batch: what it was trained on.
        """
        seen = Seen(step=step, row=row, rewards=rewarded, batch=batch)
        signal = seen.signal or not self.of_rewards
        found = {"signal": not signal, "gradient": _no_gradient(row) if signal else None, **self._entropy(row)}
        for name, wrong in found.items():
            if wrong is None:  # the step is inconclusive: what lasted before it lasts
                continue
            count = self._lasts(name, step) if wrong else self._over(name)
            first = 1 if name == "signal" and bool(np.isnan(rewarded.total).all()) else FIRST[name]
            if count >= first and count >= LONGER * self._badness.get(name, 0.0):
                self._say(name, count, self._what(name, seen))
        for name, symptom in self.symptoms.items():
            told = symptom.find(row)
            if told and name == "truncated":
                told = truncated(row, **self._ways(seen))
            if told and name == "apart":
                told = apart(row, **self._runs())
            count = self._over(name) if told is None else self._lasts(name, step)
            if told and count >= symptom.steps and told.badness >= symptom.worse * self._badness.get(name, 0.0):
                self._say(name, told.badness, told.message, told.fix)
        self._unseen -= row.keys()
        for name in sorted(self._unseen):
            if self._lasts(f"no {name}", step) == MISSING:
                where = nearest(name, row) or "; whet docs run-folder says which there are, and when"
                log.warning("trainer.warn_when.%s: %d rows, and none had that metric%s", name, MISSING, where)

    def _lasts(self, name: str, step: int) -> int:
        """Notes what a row shows. Returns: how many have shown it."""
        first, count = self._since.get(name, (step, 0))
        self._since[name] = (first, count + 1)
        return count + 1

    def _over(self, name: str) -> int:
        self._since.pop(name, None)
        return 0

    def _say(self, name: str, badness: float, message: str, fix: str = "") -> None:
        self._badness[name] = badness
        first, count = self._since[name]
        when = f"step {first}" if count == 1 else f"for {count} steps, since step {first}"
        log.warning("%s: %s%s", when, message, fix and f"; {fix}", extra={"fix": fix, "key": "trainer.warn_when"})

    def _what(self, name: str, seen: Seen) -> str:
        """What is wrong, what it means, and what to look at."""
        if name == "signal":
            return _silence(seen, self._ways(seen)["longer"])
        if name == "gradient":
            return (
                "the gradient is exactly 0 though advantages are not, so nothing is learned; look at "
                "algo.policy_loss_fn and algo.loss_agg_mode (a loss without a gradient, weights of 0), and at entropy "
                "(0: the policy is certain of every token)"
            )
        if name == "certain":
            return (
                f"the policy is certain of every token (entropy {seen.row['entropy/token_mean']:.3g}), so all "
                "completions of a prompt are the same and nothing more is learned. If the reward is still too low: "
                f"{lower_lr_advice(Role.ACTOR)}; a higher rollout.temperature or algo.beta helps prevent this"
            )
        return (
            f"the policy samples nearly uniformly from {self._choices()} tokens (entropy "
            f"{seen.row['entropy/token_mean']:.6g}), as a model with random weights does; if it was better before, "
            f"{lower_lr_advice(Role.ACTOR)}"
        )

    def _entropy(self, row: Mapping[str, float]) -> dict[str, bool | None]:
        """Whether the policy is certain of everything or of nothing; None where no entropy was measured."""
        entropy = row.get("entropy/token_mean", math.nan)
        if math.isnan(entropy):
            return {"certain": None, "even": None}
        most = self._choices()
        even = most is not None and entropy >= (1 - EVEN) * math.log(most)
        return {"certain": entropy <= CERTAIN, "even": even}

    def _ways(self, seen: Seen) -> dict[str, Any]:
        """What can still be set where completions are truncated: see symptoms.truncated."""
        rollout, positions = self.cluster.rollout_for(Mode.TRAIN), max_positions(self.cluster.actor.module)
        prompts = [group.prompt for group in seen.rewards.groups]
        room = math.inf if positions is None else positions - rollout.max_tokens_to_generate
        full = room <= max(len(p.tokens) for p in prompts) or room == rollout.max_prompt_length  # the longest of all
        plain = isinstance(prompts[0].source, str) and not self.templated
        return {
            "longer": FULL if full else RAISE,
            "template": plain and uses_chat_template(self.cluster.tokenizer, rollout.chat_template_kwargs),
            "end": not rollout.eos_tokens,
        }

    def _runs(self) -> dict[str, str]:
        """What samples, and what the trainer computes in: see symptoms.apart."""
        return {"engine": self.cluster.engine_name, "dtype": self.cluster.dtypes[Role.ACTOR.value]}

    def _choices(self) -> int | None:
        return most_choices(self.cluster.actor.support, _vocabulary(self.cluster.actor.module))

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to warn as this one would: since when each warning lasts."""
        return {"since": {name: list(found) for name, found in self._since.items()}, "badness": dict(self._badness)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; an empty one, of a checkpoint of an earlier version, starts from nothing."""
        self._since = {name: (int(first), int(count)) for name, (first, count) in state.get("since", {}).items()}
        self._badness = {name: float(badness) for name, badness in state.get("badness", {}).items()}


def most_choices(support: Support, vocabulary: int) -> int | None:
    """How many tokens a uniform policy draws from: its entropy is the logarithm of this number.

    Args: support: of the draws. vocabulary: tokens there are.
    Returns: the number; None where it is less than two or differs from token to token (a constraint).

    >>> most_choices(Support(), 100), most_choices(Support(top_k=50, top_p=0.5), 100), most_choices(Support(top_k=1), 9)
    (100, 25, None)
    """
    if support.full or support.temperature == 0:
        return vocabulary if vocabulary > 1 else None
    if support.constrained:
        return None
    left = vocabulary - len({i for i in support.forbidden_ids if 0 <= i < vocabulary})
    left = min(left, support.top_k or left)
    left = math.ceil(left * support.top_p)
    return left if left > 1 else None


def _vocabulary(module: nn.Module) -> int:
    return int(module.get_input_embeddings().weight.shape[0])  # pyright: ignore


def _no_gradient(row: Mapping[str, float]) -> bool | None:
    """Whether every update of a step had a gradient of exactly 0; None where all were skipped."""
    return row["grad_norm"] == 0.0 if "grad_norm" in row else None


def _silence(seen: Seen, longer: str) -> str:
    """Why no token has an advantage, and what to look at. Args: longer: what gives completions more room."""
    group, text = seen.rewards.groups[0], seen.rewards.texts[0][0]
    reward = float(seen.rewards.total[0])
    scored = "no reward" if math.isnan(reward) else f"reward {reward}"
    said = f"To {group.prompt.source!r:.80} the model said {text!r:.80}, {scored}"
    done = [c.finish_reason for g in seen.rewards.groups for c in g.completions]
    share = sum(reason == "length" for reason in done) / len(done)
    ended, failed = "All completions ended by themselves", done.count("error")
    if failed:
        ended = f"The environment failed in {failed} of {len(done)} episodes: look at the warnings above"
    elif share:
        ended = f"{share:.0%} of the completions were truncated: {longer} if that is why"
    cause = f"nothing is learned from the rewards: {_cause(seen, longer)}"
    return f"{cause}. {ended}. {said}. See completions/ for all of them"


def _cause(seen: Seen, longer: str) -> str:
    rewarded, batch = seen.rewards, seen.batch
    if not batch.mask.any():
        return (
            "no completion ended by itself, and algo.mask_truncated_completions leaves those out; "
            f"{longer}, or switch it off"
        )
    none, number = int(np.isnan(rewarded.total).sum()), len(rewarded.total)
    functions = ", ".join(rewarded.table) or "the reward functions"
    if none == number:
        failed = [n for n in rewarded.table if f"rewards/{n}/errors" in seen.row]
        if failed:
            return (
                f"all rewards are None, since {', '.join(failed)} failed and trainer.on_reward_error=none counts that "
                "as None; look at rewards/<function>/errors and at the warnings above, or set it to raise"
            )
        if all(c.finish_reason == "error" for g in rewarded.groups for c in g.completions):
            return (
                "all rewards are None, since the environment failed in each episode and trainer.on_reward_error=none "
                "ends it without one; repair it, or set that to raise"
            )
        return f"all rewards are None: {functions} applied to no completion; look at the columns that they read"
    if rewarded.have_spread.any():
        return "rewards differ, but all advantages are 0; look at algo.advantage_estimator"
    same = all(len({c.tokens.tobytes() for c in g.completions}) == 1 for g in rewarded.groups)
    if same and all(len(g.completions) > 1 for g in rewarded.groups):
        return (
            "the completions of each group are all the same, and so are their rewards: the policy has collapsed or "
            f"rollout.temperature is too low; raise it, or {lower_lr_advice(Role.ACTOR)}"
        )
    some = f" ({none} of {number} are None)" if none else ""
    return (
        f"the rewards within each group are all equal{some}; check {functions} and algo.reward_weights, raise "
        "algo.num_generations or rollout.temperature, or bring prompts that are neither too hard nor too easy"
    )
