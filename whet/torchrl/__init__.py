"""TorchRL's GRPO objectives and its Monte-Carlo advantage, computed by whet's losses; a program changes one import.

    from whet.torchrl import GRPOLoss, MCAdvantage        # was: from torchrl.objectives.llm import ...

Nothing is imported from TorchRL; data and results are TensorDicts, which need the package tensordict.
docs/from-torchrl.md lists every option and field.
"""

from whet.errors import ConfigError
from whet.util.install import install_hint

try:
    import tensordict as _tensordict  # noqa: F401
except ImportError as error:  # pragma: no cover  (the tests have it)
    raise ConfigError(f"whet.torchrl needs tensordict ({error}); {install_hint('torchrl')}") from error

from whet.torchrl.groups import Trajectory, mc_advantage
from whet.torchrl.loss import DAPO, CISPOLoss, GRPOLoss
from whet.torchrl.output import CISPOLossOutput, DAPOLossOutput, GRPOLossOutput, LLMLossOutput
from whet.torchrl.selection import MCAdvantageSelector
from whet.torchrl.transform import MCAdvantage

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "LLMLossOutput",
    "MCAdvantage",
    "MCAdvantageSelector",
    "Trajectory",
    "mc_advantage",
]
