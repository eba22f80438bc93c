"""Drafts in the layouts that serving engines and other trainers read."""
