"""What runs the tests; no tests."""
