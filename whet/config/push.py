"""What `whet push` takes."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.base import config, config_from_dict
from whet.config.fields import Bool, Name, Strings, Text
from whet.config.loader import parse_config_args
from whet.errors import ConfigError

__all__ = ["PushConfig", "check_push", "load_push"]


@config
class PushConfig:
    """Everything that `whet push` needs. The token is that of `hf auth login`, or HF_TOKEN.

    >>> load_push(["runs/a", "repo=me/sums", "which=best"]).which
    'best'
    """

    run: Name | None = None
    """Folder of the run; may be given as the first word alone."""
    repo: Name | None = None
    """Name on the hub: user/name or organisation/name; None = the folder's name, under the user of the token."""
    which: Name = "final"
    """"final" = the model at the end, "best" = that of trainer.keep_best, "before_stop" = that of trainer.stop_when, or
    the name of a checkpoint, step-000100."""
    private: Bool = True
    """Make the repository private; false = public, for everybody to see. A repository that is there stays as it is, and
    one that is public is refused unless this is false."""
    dry_run: Bool = False
    """Show what would be sent, and send nothing."""
    merged: Bool = False
    """Merge an adapter into its base first: a whole model in fp32, which is written to merged/ in the run's folder."""
    license: Name | None = None
    """Licence for the card, as the hub names them (apache-2.0, mit, other ...); None = the base model's where known."""
    evals: Strings = ()
    """Folders of `whet eval` whose results the card shows."""
    message: Text = ""
    """Of the commit; "" = one that names the step."""
    branch: Name | None = None
    """Branch to commit to; None = main."""


def load_push(argv: Sequence[str]) -> PushConfig:
    """A PushConfig from the words of the command line, of which the first may be the run's folder.

    Raises: ConfigError: every problem at once, a line each.
    """
    words = list(argv)
    if words and "=" not in words[0] and not words[0].startswith("--"):
        return config_from_dict(PushConfig, {"run": words[0], **parse_config_args(words[1:], cls=PushConfig)})
    return config_from_dict(PushConfig, parse_config_args(words, cls=PushConfig))


def check_push(config: PushConfig) -> None:
    """Raises ConfigError where no run is given.

    >>> check_push(PushConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no run; write whet push runs/a
    """
    if config.run is None:
        raise ConfigError("no run; write whet push runs/a")
