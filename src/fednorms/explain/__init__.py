"""What a method does to a model, what leaves a site, and an overview of all methods."""
