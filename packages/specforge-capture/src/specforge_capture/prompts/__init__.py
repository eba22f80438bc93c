"""Prompts: sources, chat rendering, loss masks, the cache and the order in which a run takes them."""
