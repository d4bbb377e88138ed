"""Policies side by side on the same real pipelines: ``python -m benchmarks.multiplex``."""
