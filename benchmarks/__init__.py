"""What is measured, each a command that prints a table."""
