"""GRPOTrainer and RLOOTrainer: prompts, rollouts and rewards as TRL has them, over whet's GRPOLearner."""
