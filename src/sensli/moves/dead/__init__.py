"""Units that are zero on all data: new ones in their place, or none. Widths are found as for more units, and the function stays."""
