"""Environments: what answers a turn of the model.

An environment is, today, a function interact(messages) -> messages of a user's file; `Conversation` plays an episode of
several turns with it, in the form that whet.rollout.driver plays (a generator). Another kind of environment is another
class with `play(sampling)`. Left out on purpose: environments that are waited for (async, tools that run at once), and
rewards of single turns.
"""

from whet.envs.conversation import Conversation
from whet.envs.script import Script, load_script
from whet.envs.transcript import Transcript

__all__ = ["Conversation", "Script", "Transcript", "load_script"]
