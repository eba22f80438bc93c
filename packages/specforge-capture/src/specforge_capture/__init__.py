"""Hidden-state capture for draft-model training: prompts, target backends and feature stores.

Heavy imports (torch, transformers) happen in the modules that need them, so that this package imports at
once.
"""
