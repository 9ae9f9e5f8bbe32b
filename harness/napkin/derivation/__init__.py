"""The estimate as a person checks it: every term with its formula."""
