"""What a teacher gives a policy's loss: logprobs of the tokens as a column, or the divergence from its distribution.

Left out on purpose: a teacher of another tokenizer, and one that is asked over a network.
"""

from __future__ import annotations

from whet.cluster import RLCluster
from whet.config import Role
from whet.errors import ConfigError, DataError
from whet.train.worker import Divergence
from whet.types import TokenBatch

__all__ = ["check_teacher", "divergence_from", "with_teacher"]


def check_teacher(cluster: RLCluster, column: str, loss: object) -> None:
    """Raises ConfigError where a loss that learns from a teacher has none, or one that can't give what it needs.

    Args: column: what the loss declares, see ops.compares_with_teacher. loss: its name, for messages.
    """
    if Role.TEACHER not in cluster.workers:
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} learns from a teacher; pass RLCluster(teacher=...), or set teacher.model"
        )
    if column != "divergence":
        return
    own, teacher = cluster.actor, cluster.worker(Role.TEACHER)
    if not own.support.plain:
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} compares whole distributions, and the rollout draws from a part of one "
            "(top_k, top_p, min_p, a penalty, forbidden tokens or a constraint), which teacher and policy would cut "
            "differently; leave those off, or set rollout.logprob_support=full"
        )
    if own.loaded.packable != teacher.loaded.packable:
        padded = own.loaded if teacher.loaded.packable else teacher.loaded
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} runs the teacher in the policy's own forward passes, and {padded.name} "
            f"alone trains padded ({'; '.join(padded.unpackable_reasons)}); algo.policy_loss_fn='distillation' needs "
            "no common passes"
        )
    for worker in (own, teacher):
        if not worker.loaded.lm_head.linear:
            raise ConfigError(
                f"algo.policy_loss_fn={loss!r} needs a linear head, and that of {worker.loaded.name} is not; "
                "algo.policy_loss_fn='distillation' compares the sampled tokens"
            )


def divergence_from(cluster: RLCluster, gkd_beta: float) -> Divergence:
    """What the actor's trainer is asked for. Args: gkd_beta: 0 the forward KL, 1 the reverse KL."""
    return Divergence(cluster.worker(Role.TEACHER), gkd_beta)


def with_teacher(cluster: RLCluster, batch: TokenBatch, column: str) -> TokenBatch:
    """The batch with `teacher_logprobs`, where a loss declares that column: of its tokens, under the rollout's support.

    Raises: DataError: a token that the teacher has no row for.
    """
    teacher = cluster.worker(Role.TEACHER)
    most = int(batch.tokens.max()) if batch.num_tokens else 0
    if most >= teacher.loaded.num_ids:
        raise DataError(
            f"the policy sampled token {most}, which is no token of its tokenizer, and the teacher "
            f"{teacher.loaded.name} knows {teacher.loaded.num_ids}; forbid the padding of its vocabulary by "
            "rollout.forbidden_tokens"
        )
    if column != "teacher_logprobs":
        return batch
    with cluster.trace.span("teacher_logprobs"):
        found = teacher.logprobs(batch).logprobs
        return batch.with_token_columns(teacher_logprobs=found)  # pyright: ignore[reportArgumentType]
