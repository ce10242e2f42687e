"""In: what tasks touched. Out: the old versions that must stay."""
