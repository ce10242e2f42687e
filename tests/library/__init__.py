"""Tests of clamor_ray."""
