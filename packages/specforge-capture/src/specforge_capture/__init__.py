"""specforge_capture."""
