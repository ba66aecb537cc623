"""The configuration of `whet push`."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.base import config, config_from_dict
from whet.config.fields import Bool, Name, Strings, Text
from whet.config.loader import parse_config_args
from whet.errors import ConfigError

__all__ = ["PushConfig", "check_push", "load_push"]


@config
class PushConfig:
    """Everything that `whet push` needs. It uses the token of `hf auth login`, or HF_TOKEN.

    >>> load_push(["runs/a", "repo=me/sums", "which=best"]).which
    'best'
    """

    run: Name | None = None
    """Folder of the run; the first word may be the folder without `run=`."""
    repo: Name | None = None
    """Hub repository: user/name or organisation/name; None = the folder's name under the token's user."""
    which: Name = "final"
    """"final" = the model at the end, "best" = that of trainer.keep_best, "before_stop" = that of trainer.stop_when, or
    the name of a checkpoint, step-000100."""
    private: Bool = True
    """Make the repository private; false = public. An existing repository is not changed, and an existing public one is
    refused unless this is false."""
    dry_run: Bool = False
    """Show the files that would be sent, and send nothing."""
    merged: Bool = False
    """Merge an adapter into its base first, and write the whole model in fp32 to merged/ in the run's folder."""
    license: Name | None = None
    """Licence for the card, by the hub's name (apache-2.0, mit, other ...); None = the base model's, if known."""
    evals: Strings = ()
    """Folders of `whet eval`; the card shows their results."""
    message: Text = ""
    """Commit message; "" = one that names the step."""
    branch: Name | None = None
    """Branch to commit to; None = main."""


def load_push(argv: Sequence[str]) -> PushConfig:
    """Returns a PushConfig from command-line arguments. The first may be the run's folder.

    Raises: ConfigError: every problem at once, a line each.
    """
    words = list(argv)
    if words and "=" not in words[0] and not words[0].startswith("--"):
        return config_from_dict(PushConfig, {"run": words[0], **parse_config_args(words[1:], cls=PushConfig)})
    return config_from_dict(PushConfig, parse_config_args(words, cls=PushConfig))


def check_push(config: PushConfig) -> None:
    """Raises ConfigError if no run is given.

    >>> check_push(PushConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no run; write whet push runs/a
    """
    if config.run is None:
        raise ConfigError("no run; write whet push runs/a")
