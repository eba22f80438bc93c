"""Draft models for speculative decoding: methods, sharded training, checkpoints, decoding and export.

Start at `specforge_train.trainer`; the draft methods are in `specforge_train.registry`.
"""
