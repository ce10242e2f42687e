"""What processes say to each other: messages, proofs, names, causes. In: values; out: values. No
I/O.
"""
