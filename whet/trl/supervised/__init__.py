"""SFTTrainer, DPOTrainer and RewardTrainer: rows as TRL takes them, over whet's supervised learners."""
