"""From operators to a bound on the whole head: one method per file."""
