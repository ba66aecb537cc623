"""Environments: what answers a turn of the model.

multi_turn.py       the loop of an episode with several turns, one generator for all environments
sessions.py         the conversations of an episode as token sequences; transcript.py is an episode's one conversation
conversation.py     a user's function interact(messages) or class answers; script.py loads it
environment.py      the user's class: its methods are tools, and each episode has an instance
adapters/           environments of other packages, as classes
tool_episodes.py    tools answer the calls of a turn; tool_calls.py parses the calls, tools.py runs the functions

An environment has a generator method `run_episode(episode, sampling)`, which whet.rollout.driver runs.
"""

from whet.envs.conversation import Conversation
from whet.envs.environment import EnvironmentClass
from whet.envs.script import Script, load_script
from whet.envs.tool_episodes import ToolEpisodes
from whet.envs.tools import Tools
from whet.envs.transcript import ChatTranscript

__all__ = ["ChatTranscript", "Conversation", "EnvironmentClass", "Script", "ToolEpisodes", "Tools", "load_script"]
