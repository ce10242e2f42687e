"""What a page server has in its directory of a session's store: its homes' files, and the layers of
commits that they may not have yet.
"""
