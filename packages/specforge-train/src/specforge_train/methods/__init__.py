"""Draft methods: one folder each, and what they share."""
