"""Reports: a run, a comparison, a table or an advice as one HTML file that needs no network."""
