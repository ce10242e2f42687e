"""In: what makes and pickles references. Out: what Ray counts of them.

Anchors.
"""
