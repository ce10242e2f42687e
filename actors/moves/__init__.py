"""In: a home that lives, and a server that takes it. Out: the region is homed there."""
