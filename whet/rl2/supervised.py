"""What several keys of RL2's sft, rm and dpo say together."""

from __future__ import annotations

from whet.config import DPORunConfig, RMRunConfig, SFTRunConfig
from whet.rl2.given import Given
from whet.rl2.shared import Part, models, split_of, trainer

__all__ = ["DPO", "RM", "SFT", "averaging", "rows"]


def rows(given: Given) -> Part:
    """Data sets, their lengths, and the budget of tokens."""
    path = given.need("the data", "data.path", "data.train.path")
    flat: Part = {"trainer.last_batch": "drop", "data.on_long": "truncate"}
    flat["data.split"], flat["data.path"] = split_of(path)
    flat["data.max_length"] = length = given.need("the longest sequence", "data.max_length", "data.train.max_length")
    flat["data.batch_size"] = given.count("data.batch_size", "data.train.batch_size", default=128)
    test = given.get("data.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = split_of(test)
        if given.get("data.test_ratio") is not None:
            given.problems.append("data.test_ratio has no effect next to a test path; leave one of them out")
    elif given.is_later:
        flat["data.eval_fraction"] = given.get("data.test_ratio", default=0.03)
    templated = given.get("data.apply_chat_template", "data.train.apply_chat_template", default=True)
    flat["data.apply_chat_template"] = templated
    given.same(length, "data.test.max_length")
    given.same(templated, "data.test.apply_chat_template")
    for name in ("prompt_key", "response_key", "messages_key", "chosen_key", "rejected_key"):
        if given.get(f"data.test.{name}") is not None:
            given.same(given.get(f"data.train.{name}"), f"data.test.{name}")
    if (budget := given.get("actor.max_length_per_device", "critic.max_length_per_device")) is not None:
        flat["trainer.max_tokens_per_microbatch"] = budget
    return flat


def averaging(given: Given) -> Part:
    """avg_level: a mean over the conversations of a batch in July 2025, over its tokens since, unless it is said."""
    modes = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
    level = given.get("actor.avg_level", default="sequence" if given.is_july else "token")
    return {"algo.loss_agg_mode": modes.get(given.one_of("actor.avg_level", level, tuple(modes)))}


SFT = (models, rows, averaging, trainer), lambda given: SFTRunConfig
"""What makes a configuration of sft, and its class."""
RM = (models, rows, trainer), lambda given: RMRunConfig
"""The same of rm."""
DPO = (models, rows, trainer), lambda given: DPORunConfig
"""The same of dpo."""
