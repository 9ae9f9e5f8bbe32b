LOOKED_AT: frozenset[str] = frozenset()
