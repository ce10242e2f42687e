"""Where a process is in the cluster: sessions, their beginning and end, put, share, free, stats."""
