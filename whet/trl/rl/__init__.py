"""GRPOTrainer and RLOOTrainer over whet's GRPOLearner."""
