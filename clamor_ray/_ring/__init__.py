"""Groups of actors that reduce arrays among themselves: who is a member, and how they connect."""
