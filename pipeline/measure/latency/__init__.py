"""Time sessions: interleaved rounds, batch sweeps, concurrent clients."""
