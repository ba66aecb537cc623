"""Computes the keys of whet's that depend on several keys of RL2's sft, rm and dpo."""

from __future__ import annotations

from whet.rl2.common import WhetKeys, context_size, split_of
from whet.rl2.parsed_args import ParsedArgs

__all__ = ["translate_averaging", "translate_data"]


def translate_data(args: ParsedArgs) -> WhetKeys:
    """Translates data sets, their lengths, and the token budget."""
    path = args.require("the data", "data.path", "data.train.path")
    flat: WhetKeys = {"trainer.last_batch": "drop", "data.on_long": "truncate"}
    flat["data.split"], flat["data.path"] = split_of(path)
    length = args.get("data.max_length", "data.train.max_length")
    if isinstance(length, int):  # RL2 bounds the model's input, which lacks the last token
        flat["data.max_length"] = length + (args.trainer != "rm")
    flat["data.batch_size"] = args.get_count("data.batch_size", "data.train.batch_size", default=128)
    test = args.get("data.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = split_of(test)
        if args.get("data.test_ratio") is not None:
            args.problems.append("data.test_ratio has no effect next to a test path; leave one of them out")
    elif args.is_2026:
        flat["data.eval_fraction"] = args.get("data.test_ratio", default=0.03)
    args.require_equal(length, "data.test.max_length")
    if (budget := args.get("actor.max_length_per_device", "critic.max_length_per_device")) is not None:
        budget = budget * context_size(args) if isinstance(budget, int) else budget
        most = flat.get("data.max_length", 0)
        fits = isinstance(budget, int) and most == budget + 1
        flat["trainer.max_tokens_per_microbatch"] = most if fits else budget
    return flat | _translate_columns(args)


def _translate_columns(args: ParsedArgs) -> WhetKeys:
    """Translates the columns to read: conversations with the chat template, texts without it."""
    templated = args.get(
        "data.apply_chat_template", "data.train.apply_chat_template", default=not args.is_september_2025
    )
    args.require_equal(templated, "data.test.apply_chat_template")
    flat: WhetKeys = {"data.apply_chat_template": templated}
    names = (
        ("prompt", "response", "messages") if args.trainer == "sft" else ("prompt", "messages", "chosen", "rejected")
    )
    columns = {name: args.get(f"data.{name}_key", f"data.train.{name}_key") for name in names}
    for name, column in columns.items():
        args.require_equal(column or name, f"data.test.{name}_key")
    if args.is_september_2025:  # which reads texts where a row has any
        return flat | {f"data.{name}_column": column for name, column in columns.items() if column}
    if args.trainer == "sft":
        names = ("messages",) if templated else ("prompt", "response")
    elif args.is_july_2025 or columns["messages"]:
        names = ("messages", "chosen", "rejected") if templated else ("prompt", "chosen", "rejected")
    else:  # with the template both are whole conversations
        names = ("chosen", "rejected") if templated else ("prompt", "chosen", "rejected")
    return flat | {f"data.{name}_column": columns[name] or name for name in names}


def translate_averaging(args: ParsedArgs) -> WhetKeys:
    """avg_level. Its default is a mean over conversations in July 2025, and over tokens since."""
    modes = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
    level = args.get("actor.avg_level", default="sequence" if args.is_july_2025 else "token")
    return {"algo.loss_agg_mode": modes.get(args.require_choice("actor.avg_level", level, tuple(modes)))}
