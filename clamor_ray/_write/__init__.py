"""Changes: private memory over a snapshot, and one commit. In: writes; out: a version."""
