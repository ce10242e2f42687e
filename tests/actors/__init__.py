"""Tests of the registry and the page servers."""
