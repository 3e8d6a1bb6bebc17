"""Testing models: scores per site, and which model and statistics each score belongs to."""
