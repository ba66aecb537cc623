"""TRL's configurations: a table of the fields, checks, and the translation to whet's configuration.

    training.py, supervised.py    tables of fields that several configurations have
    grpo.py, rloo.py, sft.py, dpo.py, kto.py, reward.py    a configuration's own fields, then its class

arguments.py is the base class; rl.py and supervised.py are the bases for reinforcement learning and for the rest.
"""
