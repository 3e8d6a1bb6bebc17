"""What a method does to a model, what leaves a site, and all methods next to each other."""
