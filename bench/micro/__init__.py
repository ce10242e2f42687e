"""What single calls cost in one process, by pytest-benchmark: ``make microbench``.

Nothing here passes or fails by a time: each figure is a ratio to a control in the same run.
"""
