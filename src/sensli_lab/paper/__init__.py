"""The paper's experiments as data: read a file, train its arms, store, draw, and check the claims.

experiments/*.json --planning--> Plan --runner, engine--> store --figures, tables, claims--> report
"""
