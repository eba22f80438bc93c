"""specforge_launch."""
