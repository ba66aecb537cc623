"""SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer over whet's supervised learners."""
