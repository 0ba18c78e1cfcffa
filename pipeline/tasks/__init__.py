"""Do the work of steps. A task is a frozen model whose fields are its parameters."""
