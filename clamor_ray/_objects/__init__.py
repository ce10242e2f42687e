"""From objects to buffers to blocks, and back. In: an object; out: bytes at offsets. Pure."""
