"""In: a plan. Out: text or a picture."""
