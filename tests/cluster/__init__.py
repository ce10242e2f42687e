"""Tests on clusters of several nodes."""
