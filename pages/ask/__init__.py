"""The page that asks: the site without a server, and what the guide says and shows of it."""
