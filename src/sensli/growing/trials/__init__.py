"""Try before you keep: the best candidates and the model as it is train on for a while from the same state, and the best of them stays."""
