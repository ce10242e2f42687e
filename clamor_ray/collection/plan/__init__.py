"""What is to be computed: operators, stages, versions. In: calls; out: a graph. Runs nothing."""
