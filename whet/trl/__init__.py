"""TRL's trainers over whet's learners: change the import, and a script for TRL runs. TRL itself is not needed.

config/        TRL's configurations: tables of their fields, checks, and the translation to whet's configuration
trainer/       the base of all trainers: callbacks, state, logs, files
rl/            GRPOTrainer, RLOOTrainer        agents/    tools, environments, rollout_func
supervised/    SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer
rewards.py     TRL's reward functions          scripts.py    the arguments of its scripts
data_utils.py, models.py, callbacks.py         helpers for rows and models, and callbacks
command.py     `python -m whet.trl`            missing_names.py     TRL's names that whet.trl lacks

The public names are in __init__.pyi, and are imported when they are first used: a script imports what it needs.
"""

from whet.trl.missing_names import MISSING_NAMES
from whet.util.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, MISSING_NAMES)
