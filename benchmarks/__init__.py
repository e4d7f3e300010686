"""Benchmarks: `python -m benchmarks.NAME --help`."""
