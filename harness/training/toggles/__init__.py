"""What each toggle of a recipe does to the model, the optimizer or the step: one file a toggle."""
