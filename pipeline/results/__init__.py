"""Make run.json from what steps left: records, verdicts, selection, comparison, gates."""
