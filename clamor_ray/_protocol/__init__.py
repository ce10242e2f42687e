"""In: values. Out: messages, and back.

What processes tell each other: messages, proofs, names, causes. No I/O.
"""
