"""Collections from files and to files."""
