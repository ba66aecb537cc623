"""Rewards: the contract of a reward function, its manager, and a few functions for text."""
