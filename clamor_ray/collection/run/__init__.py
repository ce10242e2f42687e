"""In: stages. Out: results by partition.

On the cluster.
"""
