"""The programme for a machine with a GPU: measure everything, bring it home."""
