"""In: files, arrays, tables. Out: collections, and back."""
