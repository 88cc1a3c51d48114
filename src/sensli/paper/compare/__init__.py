"""Growth methods and networks of fixed size side by side, at equal FLOPs: tasks, methods, runs, the front, tables and the report.

    Task, Method --training--> Run --store--> front, summary --> table, figure, report

Every method starts from the same network, sees the same data in the same order and spends the same number of FLOPs, in which all that
it looks at, scores, searches and tries is included. Built on the core and on what the paper's experiments have: data, files, statistics.
"""
