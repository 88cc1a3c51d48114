"""Growth methods of other papers, and controls: strategies for `Grower(strategy="...")`. None of them changes the model by itself."""
