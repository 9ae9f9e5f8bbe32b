"""The commands that show what earlier runs left."""
