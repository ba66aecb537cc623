"""`whet push`: a run's model to the Hugging Face hub."""

from __future__ import annotations

import dataclasses

from whet.cli.output import print_text
from whet.config.push import PushConfig, check_push
from whet.hub.push import PushResult, push_to_hub

__all__ = ["push"]


def push(config: PushConfig) -> PushResult:
    """Sends a run's model, tokenizer and card, and prints where; with dry_run what would be sent.

    Args: config: the whole configuration.
    Raises: ConfigError, CheckpointError: see run.push.push_to_hub.
    """
    check_push(config)
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in ("run", "repo")}
    done = push_to_hub(config.run or "", config.repo, **options)
    who = "private" if done.private else "public"
    if done.url is None:
        lines = [f"would be sent to {done.repo} ({who}):"]
        lines += [f"  {size:>14,} bytes  {name}" for name, size in done.files.items()]
        lines += [f"  {sum(done.files.values()):>14,} bytes  in all", "", "README.md:", "", done.card]
    else:
        lines = [f"sent to {done.repo}: {done.url}"]
    print_text("\n".join(lines))
    return done
