"""The `specforge-launch` command: plan, run, evaluate, export and report. Importing it loads no torch."""
