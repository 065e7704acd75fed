"""What `tba buffer ...` does to a database file: query, show, search, export, import, compact,
check, backup, restore, prune; and the query server."""
