"""The tables of the database: one file for what belongs together, the only place with SQL that writes."""
