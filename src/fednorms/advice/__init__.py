"""Choose a method for a federation: measure, propose, run a tournament on validation images, answer."""
