"""Rates of networks between hosts, read from the words of a row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from planner.measurements.catalogues import read_rows

__all__ = ["Rate", "stated_rate"]

_UNIT = r"([TtGg])([Bb])(?:its?)?"
_SECOND = r"(?P<per>ps|/s(?:ec)?|[Ee])"
_COUNTED = re.compile(
    rf"(?<![\w.])(\d+)\s*[xX×*]\s*(\d+)\s*{_UNIT}{_SECOND}?(?![A-Za-z])"
)
_TOTAL = re.compile(rf"(?<![\w.])(\d+(?:\.\d+)?)\s*-?{_UNIT}\s?{_SECOND}(?![A-Za-z])")
#: "100Gb IB"; such a rate may lack its "per second".
_NAMED = re.compile(
    r"(?<![\w.])(\d+)\s*-?([Gg])(b?)(?:its?)?\s+"
    r"(?=roce|ib\b|infiniband|ethernet|efa|rdma|omni-?path|[fehnx]dr)",
    re.IGNORECASE,
)
_INFINIBAND = re.compile(r"\b(fdr|edr|hdr100|hdr|ndr200|ndr|xdr)\b", re.IGNORECASE)
_PER_DEVICE = re.compile(
    r"^[\w\s]{0,16}?(?:per |/|a )\s*(?:gpu|device|chip)", re.IGNORECASE
)
_PER_HOST = re.compile(r"^[\w\s]{0,16}?(?:per |/|a )\s*(?:node|host)", re.IGNORECASE)
_RDMA = re.compile(r"roce|rdma|infiniband|\bib\b|\befa\b|slingshot", re.IGNORECASE)
_TCP = re.compile(r"\btcp\b|ethernet|\bgbe\b|\d\s*gbe\b", re.IGNORECASE)
_ABOUT_NETWORK = re.compile(
    r"inter-?node|between (?:nodes|hosts)|(?:per|/|a) ?(?:node|host)|network|ethernet|"
    r"roce|infiniband|\bib\b|\befa\b|\bnics?\b",
    re.IGNORECASE,
)
_NVLINK = re.compile(r"nvlink|nvswitch|intra", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of a network that a row states.

    Attributes:
        gbits: Gbit/s and direction of what ``of`` names.
        of: A host, a device, or one network interface.
        rdma: False for TCP, None if it is not stated.
        guessed: Whether ``of`` is not stated.
        text: The words that state it.
    """

    gbits: float
    of: Literal["host", "device", "nic"]
    rdma: bool | None
    guessed: bool
    text: str

    def total_gbits(self, *, nics: int, devices: int) -> float:
        """Return the Gbit/s of all interfaces of a host with so many of each."""
        return self.gbits * {"host": 1, "device": devices, "nic": nics}[self.of]


def stated_rate(gpu: str, notes: str) -> Rate | None:
    """Return the rate in a GPU's name, else in notes that speak of a network."""
    found = _rate(gpu)
    if found is None and _ABOUT_NETWORK.search(notes):
        found = _rate(notes)
    return found


def _rate(text: str) -> Rate | None:
    rdma = True if _RDMA.search(text) else False if _TCP.search(text) else None
    for match in _COUNTED.finditer(text):
        # "8x80GB" is memory, "4x100Gb" is not.
        if match[4] == "b" or match["per"]:
            gbits = int(match[1]) * _gbits(match[2], match[3], match[4])
            return Rate(
                gbits=gbits, of="host", rdma=rdma, guessed=False, text=match[0].strip()
            )
    for match in (*_TOTAL.finditer(text), *_NAMED.finditer(text)):
        after = text[match.end() :]
        around = text[max(0, match.start() - 24) : match.end() + 16]
        if _NVLINK.search(around) or (match[2] in "Tt" and match[3] == "B"):
            # Of links inside hosts, or of memory.
            continue
        device = _PER_DEVICE.search(after) is not None
        return Rate(
            gbits=_gbits(match[1], match[2], match[3]),
            of="device" if device else "host",
            rdma=rdma,
            guessed=not device and _PER_HOST.search(after) is None,
            text=match[0].strip(),
        )
    generation = _INFINIBAND.search(text)
    if generation is not None:
        rates = {row["generation"]: row["gbits"] for row in read_rows("infiniband.csv")}
        return Rate(
            gbits=float(rates[generation[1].lower()]),
            of="nic",
            rdma=True,
            guessed=True,
            text=f"InfiniBand {generation[1].upper()}",
        )
    return None


def _gbits(number: str, prefix: str, unit: str) -> float:
    scale = 1000 if prefix.lower() == "t" else 1
    return float(number) * scale * (8 if unit == "B" else 1)
