"""What programs share: options, waiting, reports, loops."""
