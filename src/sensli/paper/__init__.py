"""The paper's experiments as data: read a file, train its arms, store, draw, and check the claims.

    experiments/*.json --config--> Plan --runner, engine--> store --figures, tables, claims--> report

This package imports the core and is never imported by it.
"""
