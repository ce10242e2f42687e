"""In: calls of a user. Out: a collection, and results of its actions.

`collection.py` is what a user holds, and its actions; `operators.py` what makes one collection of
another. The rooms in the order in which data goes: `plan/`, `run/`, `data/`, `io/`; `explain/`
shows a plan. docs/stages.md says how data flows.
"""
