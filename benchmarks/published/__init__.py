"""What others measured and published, held against napkin and the simulation."""
