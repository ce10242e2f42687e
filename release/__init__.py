"""A release: the tree → an sdist, wheels, a bill of materials. In: a commit. Out: dist/."""
