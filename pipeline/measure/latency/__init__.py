"""Time sessions: interleaved rounds, batch sweeps, several callers."""
