"""Packing: from token batches to micro-batches with shared prefixes, in few forward passes of similar cost."""
