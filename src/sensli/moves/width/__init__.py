"""Widths: more units, channels, hidden features or heads for layers that exist. Found by marking units and watching who reads them."""
