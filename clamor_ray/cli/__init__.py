"""Programs for the command line. They stand above the library and the actors."""
