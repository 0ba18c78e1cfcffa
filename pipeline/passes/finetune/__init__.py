"""Training a pruned model until it answers as it did before: on little data, in little memory, for a limited time."""
