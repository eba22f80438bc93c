"""DSpark's training objective, from hidden states to loss terms and gradients."""
