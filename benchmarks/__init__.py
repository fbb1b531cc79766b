"""Measurements: mpipipe and its peers against what the links allow. See ``python -m benchmarks --help``."""
