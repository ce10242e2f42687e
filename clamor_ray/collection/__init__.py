"""The bulk-synchronous layer: collections, stages, lineage.

collection   what a user holds, and its actions         docs/stages.md says how data flows
operators    what it is made by from another            (pure: a node of the plan)
plan         what it stands for: a graph of operators   (pure)
stages       the graph cut into stages, fused           (pure)
schedule     which task runs where, and when again      (pure)
run          a stage on the cluster                     (Ray)
task         what one task does, on a worker
blocks       what a partition is made of                (pure)
shuffle      keys, ranges, joins                        (pure)
sources      files, arrays and tables as partitions
"""
