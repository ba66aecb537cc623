"""whet: reinforcement-learning post-training of language models.

It trains on a CPU, in one process or, under torchrun, in several. It has not yet run on a GPU.

The public names are in __init__.pyi. They are imported when they are first used, so that `import whet` and the command
line start at once.
"""

import logging

from whet._version import __version__ as __version__
from whet.util.lazy_names import lazy_names
from whet.util.log_lines import DefaultHandler

_TRL = ("DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer")
_MISSING = {
    "LLM": "Sampler generates text: Sampler(model)(prompts, max_tokens=64, temperature=0.7)",
    "PPOTrainer": "PPOLearner trains by PPO, and so does the command whet ppo",
    "SamplingParams": "they are arguments of a call: Sampler(model)(prompts, max_tokens=64, temperature=0.7)",
    **{name: f"from whet.trl import {name} (whet docs trl-start)" for name in _TRL},
}
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, _MISSING)


def _warn_of_the_other() -> None:
    """Says that the index's distribution `whet`, which is a stranger's, is installed beside this one."""
    from whet.util.install import DISTRIBUTION, conflicting_version

    if version := conflicting_version():
        import warnings

        warnings.warn(
            f"the distribution whet {version} is installed too: a stranger's, whose files may lie over those of "
            f"{DISTRIBUTION}; pip uninstall whet {DISTRIBUTION}, then install {DISTRIBUTION} again",
            stacklevel=3,
        )


_warn_of_the_other()
logging.getLogger("whet").addHandler(DefaultHandler())
