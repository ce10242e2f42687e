"""Which session has which part of the address window."""
