"""How new units start: each way is one file, and `registry` names them."""
