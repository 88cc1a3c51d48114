"""Other people's modules: how they are called, copied, wrapped, counted and compared, and how arguments that hold them are checked.

Runs models and puts back what a run changes; changes no model. `engines` is for models that several processes train.
"""
