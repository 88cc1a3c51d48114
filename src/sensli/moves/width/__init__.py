"""Widths: more units, channels or hidden features for layers that exist. Found by marking units and watching who reads them."""
