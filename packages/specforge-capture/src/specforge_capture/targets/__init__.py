"""Backends that run the target and capture its hidden states."""
