"""Learners: the loop, and what each algorithm puts into it."""
