"""Stages on the cluster. In: stages; out: results by partition."""
