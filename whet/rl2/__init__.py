"""RL2's commands with one word changed: `python -m whet.rl2 ppo key=value ...`, also under torchrun.

    command.py -> parsed_args.py (keys and values) -> translate.py (whet's configuration) -> execute.py (training)

keys.py is the table of RL2's keys; ppo.py, supervised.py and common.py compute the keys of whet's that depend on
several keys of RL2's. `--print_config` prints the configuration, for `whet grpo --config`.
"""
