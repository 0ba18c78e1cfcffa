"""Write precisions into graphs: groups of operators, their types, casts and Q/DQ pairs."""
