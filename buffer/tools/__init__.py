"""What `tba buffer ...` does to a database file: query, show, export, import, check, backup, prune."""
