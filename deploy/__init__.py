"""Running the roles: the local launcher, its live display, and systemd units."""
