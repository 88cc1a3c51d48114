"""What the stored results say: statistics, tables, figures, the checks of the paper's claims, and the report. Trains nothing."""
