"""The model as it is built: its weights, their dtypes, and what trains."""
