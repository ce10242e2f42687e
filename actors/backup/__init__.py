"""In: a session that is backed up. Out: one version of each variable, which stays readable."""
