"""The one door to C: handles over clamor_ray._pagecache. In: Python values; out: calls into the
library.
"""
