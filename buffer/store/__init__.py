"""The database file of the buffer: schema, tables, transactions."""
