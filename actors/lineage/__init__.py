"""What tasks touched, and which old versions must stay."""
