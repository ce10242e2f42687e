"""In: sessions. Out: parts of the address window."""
