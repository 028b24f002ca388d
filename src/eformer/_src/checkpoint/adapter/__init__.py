"""Adapters of LoRA alone, in a folder as the package PEFT writes and reads it."""
