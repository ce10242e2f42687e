"""Objects that are built where they are read: regions, allocators, libraries."""
