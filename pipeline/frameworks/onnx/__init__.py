"""How much of a graph is in which precision, counted from the graph itself."""
