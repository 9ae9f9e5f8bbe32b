"""What the commands show people in the terminal: tables, progress bars and lines."""
