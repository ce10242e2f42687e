"""In: a lost home. Out: another home, or which blocks are lost."""
