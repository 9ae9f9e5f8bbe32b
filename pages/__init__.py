"""What writes the pages: README's and the guide's tables and pictures, each from committed JSON."""
