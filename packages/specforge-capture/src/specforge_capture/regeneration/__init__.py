"""Answering prompts with the target."""
