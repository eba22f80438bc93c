"""Where captured features wait for the trainer."""
