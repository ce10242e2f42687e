"""In: what a process does. Out: spans of what took it long. A Chrome trace of many processes."""
