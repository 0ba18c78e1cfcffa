"""Float16 and bfloat16: which nodes can go low, where casts go, how weights and scales follow."""
