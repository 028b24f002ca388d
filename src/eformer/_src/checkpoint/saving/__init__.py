"""Saving: trees, whole folders, and checkpoints that are written again in other formats."""
