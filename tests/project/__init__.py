"""Tests of the project itself: what it packs, says and runs."""
