"""What steps do. A task is a frozen model whose fields are its parameters."""
