"""The numbers of the house: what `make house` prints.

    python -m tests.support.house [--root DIR] [--gate-minutes M] [--check]

In: a checkout, flat or in rooms. Out: a line for each number, with its target. `tree` finds files,
`graphs` finds circles, `python_side` and `c_side` read sources, `figures` puts numbers and targets
together.
"""
