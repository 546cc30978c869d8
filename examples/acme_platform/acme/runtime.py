"""Loaded by a program that wants its models on the accelerator."""

graphs: list[str] = []
"""What was compiled, in order."""
