"""Load, save and describe torch modules."""
