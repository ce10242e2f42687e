"""Commits: checks, decision, journal, and the homes told. In: a request; out: a version."""
