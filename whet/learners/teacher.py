"""A teacher for a policy's loss: its logprobs of the tokens as a column, or the divergence from its distribution.

Left out on purpose: a teacher with another tokenizer, and one behind a network.
"""

from __future__ import annotations

from whet.cluster import RLCluster
from whet.config import Role
from whet.errors import ConfigError, DataError
from whet.train.worker import Divergence
from whet.types import TokenBatch

__all__ = ["check_teacher", "divergence_from", "with_teacher"]


def check_teacher(cluster: RLCluster, column: str, loss: object) -> None:
    """Raises ConfigError where a loss learns from a teacher, and there is none or one that does not fit.

    Args: column: the one that the loss declares, see ops.compares_with_teacher. loss: its name, for messages.
    """
    if Role.TEACHER not in cluster.workers:
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} learns from a teacher; pass RLCluster(teacher=...), or set teacher.model"
        )
    if column != "divergence":
        return
    own, teacher = cluster.actor, cluster.worker(Role.TEACHER)
    if not own.processors.plain:
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} needs the full distribution of teacher and policy; turn off top_k, top_p, "
            "min_p, penalties, forbidden tokens and the constraint, or set rollout.logprobs_mode=full"
        )
    if own.loaded.packable != teacher.loaded.packable:
        padded = own.loaded if teacher.loaded.packable else teacher.loaded
        raise ConfigError(
            f"algo.policy_loss_fn={loss!r} runs the teacher in the policy's own forward passes, and {padded.name} "
            f"can't use packed rows ({'; '.join(padded.unpackable_reasons)}); set algo.policy_loss_fn='distillation', "
            "which needs no common passes"
        )
    for worker in (own, teacher):
        if not worker.loaded.lm_head.linear:
            raise ConfigError(
                f"algo.policy_loss_fn={loss!r} needs a linear head, and that of {worker.loaded.name} is not; "
                "algo.policy_loss_fn='distillation' compares the sampled tokens"
            )


def divergence_from(cluster: RLCluster, gkd_beta: float) -> Divergence:
    """Returns the divergence from the cluster's teacher. Args: gkd_beta: 0 the forward KL, 1 the reverse KL."""
    return Divergence(cluster.worker(Role.TEACHER), gkd_beta)


def with_teacher(cluster: RLCluster, batch: TokenBatch, column: str) -> TokenBatch:
    """Returns the batch with the column `teacher_logprobs`, under the rollout's distribution, if the loss declares it.

    Raises: DataError: the teacher does not have a token.
    """
    teacher = cluster.worker(Role.TEACHER)
    highest = int(batch.tokens.max()) if batch.num_tokens else 0
    if highest >= teacher.loaded.num_ids:
        raise DataError(
            f"the policy sampled token {highest}, which is no token of its tokenizer, and the teacher "
            f"{teacher.loaded.name} knows {teacher.loaded.num_ids}; forbid the padding of its vocabulary by "
            "rollout.forbidden_tokens"
        )
    if column != "teacher_logprobs":
        return batch
    with cluster.trace.span("teacher_logprobs"):
        logprobs = teacher.logprobs(batch).logprobs
        return batch.with_token_columns(teacher_logprobs=logprobs)  # pyright: ignore[reportArgumentType]
