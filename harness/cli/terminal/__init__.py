"""What people read in the terminal: tables, bars and lines."""
