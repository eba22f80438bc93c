"""specforge_train."""
