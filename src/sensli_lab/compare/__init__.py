"""Growth methods and networks of fixed size side by side, at equal FLOPs: tasks, methods, runs, the front, tables and the report."""
