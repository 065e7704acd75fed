"""One module per group of related tables. Only these modules contain SQL that writes."""
