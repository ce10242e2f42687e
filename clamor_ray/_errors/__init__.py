"""The exceptions that a user can see, by subject. `errors.py` is where users find them."""
