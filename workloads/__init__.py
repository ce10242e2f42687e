"""Runnable programs on the library: ``python -m clamor_ray.workloads.knn --help``."""
