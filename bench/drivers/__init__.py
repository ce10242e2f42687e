"""Drivers in a process or a namespace of their own, for benchmarks."""
