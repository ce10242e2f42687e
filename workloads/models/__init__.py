"""What programs compute: arithmetic without Ray."""
