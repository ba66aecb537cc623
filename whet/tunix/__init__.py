"""Tunix's names: `from whet.tunix import RLCluster, GRPOLearner, ...` is the changed line of a Tunix program.

What each is here, and what is not there: docs/from-tunix.md. The names are in __init__.pyi, and are imported when they
are first used.
"""

from whet.util.lazy_names import lazy_names

ABSENT = {
    "CheckpointManager": "a run saves and resumes by itself: checkpoint_root_directory and checkpointing_options",
    "DPOTrainer": "preferences are trained by `whet dpo`, from Python by whet.PreferenceLearner",
    "DPOTrainingConfig": "preferences are trained by `whet dpo`, from Python by whet.PreferenceLearner",
    "DistillationTrainer": "policy_loss_fn distillation or gkd of a run with a teacher, RLCluster(teacher=...)",
    "DistillationTrainingConfig": "policy_loss_fn distillation or gkd of a run with a teacher, RLCluster(teacher=...)",
    "MetricsLogger": "a run logs by itself: metrics_logging_options, or an object in loggers",
    "ORPOTrainer": "algo.loss_type=orpo of `whet dpo`, from Python of whet.PreferenceLearner",
    "ORPOTrainingConfig": "algo.loss_type=orpo of `whet dpo`, from Python of whet.PreferenceLearner",
    "PeftTrainer": "conversations and texts are trained by `whet sft`, from Python by whet.SFTLearner; its losses are "
    "functions of a JAX model",
    "PerfSpanQuery": "time/ metrics go to every logger, and perf_metrics_options writes a timeline",
}
"""Public names of Tunix that are not here, and what does the same."""
ABSENT |= {name.replace("DPO", "Dpo").replace("ORPO", "Orpo"): why for name, why in ABSENT.items()}

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__, ABSENT)
