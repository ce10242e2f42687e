"""What a plan looks like, as text and as a picture."""
