"""What several keys of RL2's sft, rm and dpo say together."""

from __future__ import annotations

from whet.config import DPORunConfig, RMRunConfig, SFTRunConfig
from whet.rl2.common import Part, models, split_of, trainer
from whet.rl2.parsed_args import Given

__all__ = ["DPO", "RM", "SFT", "averaging", "rows"]


def rows(given: Given) -> Part:
    """Data sets, their lengths, and the budget of tokens."""
    path = given.need("the data", "data.path", "data.train.path")
    flat: Part = {"trainer.last_batch": "drop", "data.on_long": "truncate"}
    flat["data.split"], flat["data.path"] = split_of(path)
    length = given.get("data.max_length", "data.train.max_length")
    if isinstance(length, int):  # there it bounds what the model reads, which is without a last token that is foretold
        flat["data.max_length"] = length + (given.verb != "rm")
    flat["data.batch_size"] = given.count("data.batch_size", "data.train.batch_size", default=128)
    test = given.get("data.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = split_of(test)
        if given.get("data.test_ratio") is not None:
            given.problems.append("data.test_ratio has no effect next to a test path; leave one of them out")
    elif given.is_later:
        flat["data.eval_fraction"] = given.get("data.test_ratio", default=0.03)
    given.same(length, "data.test.max_length")
    if (budget := given.get("actor.max_length_per_device", "critic.max_length_per_device")) is not None:
        most = flat.get("data.max_length", 0)
        fits = isinstance(budget, int) and most == budget + 1
        flat["trainer.max_tokens_per_microbatch"] = most if fits else budget
    return flat | _columns(given)


def _columns(given: Given) -> Part:
    """The columns that are read: with the template conversations, without it texts, whatever else a row has."""
    templated = given.get("data.apply_chat_template", "data.train.apply_chat_template", default=not given.is_september)
    given.same(templated, "data.test.apply_chat_template")
    flat: Part = {"data.apply_chat_template": templated}
    names = ("prompt", "response", "messages") if given.verb == "sft" else ("prompt", "messages", "chosen", "rejected")
    columns = {name: given.get(f"data.{name}_key", f"data.train.{name}_key") for name in names}
    for name, column in columns.items():
        given.same(column or name, f"data.test.{name}_key")
    if given.is_september:  # texts where a row has any
        return flat | {f"data.{name}_column": column for name, column in columns.items() if column}
    if given.verb == "sft":
        taken = ("messages",) if templated else ("prompt", "response")
    elif given.is_july or columns["messages"]:
        taken = ("messages", "chosen", "rejected") if templated else ("prompt", "chosen", "rejected")
    else:  # with the template both are whole conversations
        taken = ("chosen", "rejected") if templated else ("prompt", "chosen", "rejected")
    return flat | {f"data.{name}_column": columns[name] or name for name in taken}


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
