"""Persistent stores: their files, without Ray."""
