"""The year that a source's name says, in full or as conferences and arXiv do."""

from __future__ import annotations

import re

__all__ = ["year_of"]

_YEAR = r"(1[5-9]|2\d|3[0-5])"
_VENUES = (
    "aaai|acl|asplos|cvpr|dac|emnlp|euromlsys|eurosys|hotnets|hpca|hpdc|icde|iclr|icml|"
    "icpp|ipdps|isca|kdd|mlsys|neurips|nips|nsdi|osdi|p?vldb|ppopp|sigcomm|sigmod|socc|"
    "sosp|tpds"
)
#: Those that are words, or letters of one, say a year without a space alone.
_WORDS = "atc|cluster|fast|ics|isc|micro|sc"
_COUNTED = r"(?!\s*(?:x\b|(?:gpu|device|node|host|rank)s?\b|[abhv]\d00))"
_SAID = (
    re.compile(rf"(?<!\d)20{_YEAR}(?!\d){_COUNTED}"),
    re.compile(rf"(?<![a-z])(?:{_VENUES})[ _-]?['’]? ?{_YEAR}\b{_COUNTED}"),
    re.compile(rf"(?<![a-z])(?:{_WORDS})(?:[ _]?['’])?{_YEAR}\b"),
    re.compile(rf"(?<!\d){_YEAR}(?:0[1-9]|1[0-2])\.\d{{4,5}}(?!\d)"),
)


def year_of(source: str) -> int | None:
    """The latest year that a source's name says.

    Args:
        source: ``Qi et al. 2024``, ``OSDI22``, ``EuroSys '24`` and ``arXiv:2401.10241``
            say one; numbers of devices (``2024 GPUs``, ``cluster 32``) do not.
    Returns:
        From 2015 to 2035; None if it says none.
    """
    found = (one for said in _SAID for one in said.findall(source.lower()))
    return max((2000 + int(one) for one in found), default=None)
