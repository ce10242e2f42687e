"""In: a process. Out: its sessions.

Their beginning and end, put, zeros, share, free, statistics.
"""
