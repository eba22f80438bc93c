"""Attention of draft blocks to the context before their anchors and to themselves."""
