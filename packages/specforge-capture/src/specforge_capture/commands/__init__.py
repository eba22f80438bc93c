"""The commands of `specforge-capture`, one a module. Each parses before anything heavy is imported."""
