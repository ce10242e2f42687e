"""How the pieces of a variable are made redundant: levels, and groups of pieces. Pure."""
