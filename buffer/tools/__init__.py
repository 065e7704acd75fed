"""What `tba buffer ...` does to a database file: query, show, export, import, compact, check, backup."""
