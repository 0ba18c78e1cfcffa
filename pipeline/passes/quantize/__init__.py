"""What a precision means in a graph: which operators, in which types, with which casts and Q/DQ pairs."""
