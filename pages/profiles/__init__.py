"""profiles/README.md and profiles/published/README.md, from the JSON beside them."""
