"""Adapters: environments of other packages as environment classes (environment.py).

    # env.py
    from whet.envs.adapters.textarena import TextArena

    class Guess(TextArena):
        env_id = "GuessTheNumber-v0"

    whet grpo rollout.env_path=env.py:Guess rollout.max_turns=10 ...

gymnasium.py    environments of gymnasium whose observations are texts
textarena.py    games of TextArena
openenv.py      clients of OpenEnv's servers
harbor.py       task folders of Harbor, whose tests run in the sandbox
verifiers.py    environments of verifiers: an agent (rollout.agent), since verifiers runs the episode
rl2.py          RL2's functions step and env_step; rollout.env_path=env.py:step makes the class

Each imports its package when an episode begins. An adapter is a class to derive from: its attributes say which
environment, and its underscored methods how an observation becomes a text and a text an action.
"""
