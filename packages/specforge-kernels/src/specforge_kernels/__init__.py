"""Attention kernels and fused objectives for training draft models.

Each kernel is a folder: `reference.py` (plain torch, the definition), the fast path, and `api.py` (what
callers import). Notation: `T` packed tokens, `B` documents, `H` hidden, `V` vocabulary, `N` anchors, `G`
block, `M = N·G` slots, `R` Markov rank.
"""
