"""Tasks of a user: arguments that arrive as objects, what an attempt reads, what is fetched
ahead.
"""
