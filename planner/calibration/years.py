"""The year that a source's name says, in full or as conferences and arXiv do."""

from __future__ import annotations

import re

__all__ = ["year_of"]

_VENUES = (
    "asplos|atc|cluster|dac|eurosys|fast|hotnets|hpca|hpdc|iclr|icml|icpp|ics|ipdps|"
    "isca|isc|kdd|micro|mlsys|neurips|nips|nsdi|osdi|ppopp|sc|sigcomm|socc|sosp|vldb"
)
_SAID = (
    re.compile(r"(?<!\d)20(1[5-9]|2\d|3[0-5])(?!\d)"),
    re.compile(rf"\b(?:{_VENUES})(?: ?['’-])? ?(1[5-9]|2\d|3[0-5])\b"),
    re.compile(r"(?<!\d)(1[5-9]|2\d|3[0-5])(?:0[1-9]|1[0-2])\.\d{4,5}(?!\d)"),
)


def year_of(source: str) -> int | None:
    """The latest year that a source's name says; None without any.

    ``Qi et al. 2024``, ``OSDI22``, ``EuroSys '24`` and ``arXiv:2401.10241`` say one;
    numbers of devices (``2048 GPUs``) do not.
    """
    found = (one for said in _SAID for one in said.findall(source.lower()))
    return max((2000 + int(one) for one in found), default=None)
