"""Timings of the kernels."""
