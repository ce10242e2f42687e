"""Manifests of k8s/, as kustomize builds them, and what KubeRay's module says of its kinds."""
