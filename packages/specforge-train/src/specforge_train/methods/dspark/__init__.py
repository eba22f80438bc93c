"""DSpark (arXiv 2607.05147): a block draft with a Markov and a confidence head."""

from specforge_train.methods.dspark.method import DSpark

__all__ = ["DSpark"]
