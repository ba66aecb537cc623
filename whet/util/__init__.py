"""Helpers of every part: resolving names, memory and devices, output streams that never raise, converted models."""
