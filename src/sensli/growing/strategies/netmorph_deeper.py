"""NetMorph (Wei, Wang, Rui, Chen 2016), deeper: an identity map with a parametric activation that begins as the identity.

A new layer is z + a (s(z) - z) with z = W x + b, W = I, b = 0 and a = 0, so that it fits after any activation s, which Net2Net's
identity layers do not; a learns from then on (the paper writes a x + (1 - a) s(x) and begins with a = 1, which is the same). Where and when
are left to the user, so the places are taken in turn. The function is kept.

There is no released code. The paper's other way, to factorise an old filter G into two by G = F2 * F1 so that the new layer has few
zeros, is not here: it exists only where the kernel of G is at least k1 + k2 - 1 wide (for two kernels of 3 the old one must have 5), it
keeps the function only up to what the alternating least squares leave over, for which the paper states neither iterations nor a
tolerance, and it overwrites weights that are trained. Without it this is the paper's IdMorph with the paper's activation.
"""

from __future__ import annotations

from typing import ClassVar

from sensli.growing.strategies.in_turn import InTurn


class NetMorphDeeper(InTurn):
    """Parametric layers, one place after the other."""

    form: ClassVar[str] = "parametric"
