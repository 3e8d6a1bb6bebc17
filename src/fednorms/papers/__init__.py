"""Published tables and the analyses behind the papers' figures."""
