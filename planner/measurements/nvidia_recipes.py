"""Settings of NVIDIA's recipes for performance that its tables of results leave out.

The tables of Megatron-Bridge (docs/performance-summary.md) and of NVIDIA's
dgxc-benchmarking give layouts and rates. The recipes themselves, read release by
release, set the launches that CUDA graphs play back, the exchanges of tokens with
experts, their overlap and the recomputation:
``data/nvidia_recipes.csv``, one line for recipes that agree, with the file and commit.
Whether attention had a fused kernel is not theirs to set: see :class:`NvidiaRecipe`.
``known_by`` gives how a line was matched to a release: ``exact``, by the file of that
release; ``layout``, by a file whose layout is the table's; ``guess``, in part by
neighbouring releases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache

from planner.cost import Recipe
from planner.measurements.catalogues import read_rows
from planner.measurements.framework_names import year_of
from planner.measurements.points import Point

__all__ = ["NvidiaRecipe", "as_nvidia_ran", "nvidia_recipe", "recomputed"]

#: Share of the launches of a block with experts that its router and the sorting of
#: tokens are, which graphs of these two play back: of Mixtral's kernels about half
#: are before or behind the experts' own.
_ROUTING = 0.5
#: Shares of launches that a graph plays back, of blocks without experts and with.
_CAPTURED = {
    "none": (0.0, 0.0),
    "mamba": (0.0, 0.0),
    "router": (0.0, _ROUTING),
    "attention+router": (1.0, _ROUTING),
    "layers": (1.0, 1.0),
    "step": (1.0, 1.0),
}
#: Share of exchanges that hides behind another microbatch (overlap_moe_expert_parallel_
#: comm), as far as it computes long enough. An assumption: no source states it.
_BEHIND_OTHERS = 0.9
#: Launches over those without that overlap, for which layers are cut into pieces and
#: weight gradients made apart. An assumption: runs of one layout that hosts bound took
#: 1.2 (Qwen3 235B on B200, 25.11 and 26.02) to 2.0 times (Qwen3 30B on H100, 25.11 and
#: 25.09) as long with it as without.
_PIECES = 1.5
#: Words that a token's experts lie on no more than four hosts: DeepSeek-AI 2024
#: (arXiv:2412.19437), section 2.1.2.
_AT_MOST_FOUR = re.compile(r"deepseekv3")


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaRecipe:
    """One line of the file, and what it sets.

    Attributes:
        table: ``bridge`` or ``dgxc``.
        model: As in the tables, letters and digits alone.
        device: First part of a device type's name.
        precision: ``bf16``, ``fp8`` (one scale a tensor), ``mxfp8`` or ``fp4``.
        releases: Containers' versions.
        graphs: Part that CUDA graphs play back, a key of what they leave to the host.
        exchange: ``alltoall``: a copy of a token for each of its experts; ``deepep``,
            ``hybridep``: one for each host; ``""`` without experts.
        overlapped: Whether exchanges hide behind another microbatch.
        recompute: Modules, joined by ``+``.
        attention: ``fused``, or ``scores`` where no fused kernel trained heads of that
            shape on that device yet: queries of 192 with values of 128 on Blackwell
            before cuDNN 9.11, of summer 2025. Source: TransformerEngine,
            common/fused_attn/fused_attn.cpp, and its issue 2285.
    """

    table: str
    model: str
    device: str
    precision: str
    releases: tuple[str, ...]
    graphs: str
    exchange: str
    overlapped: bool
    recompute: str
    attention: str


@cache
def _recipes() -> tuple[NvidiaRecipe, ...]:
    names = [field.name for field in fields(NvidiaRecipe)]
    return tuple(
        NvidiaRecipe(
            **{
                **{name: row[name] for name in names},
                "releases": tuple(row["releases"].split()),
                "overlapped": row["overlapped"] == "yes",
            }  # type: ignore[arg-type]
        )
        for row in read_rows("nvidia_recipes.csv")
    )


def nvidia_recipe(
    point: Point, device: str, framework: str
) -> tuple[NvidiaRecipe, str] | None:
    """Return the recipe of a run, and what was taken for granted about it.

    Args:
        point: The row.
        device: Name of the device type, ``gb200-186``.
        framework: Name. Others' runs with Megatron-Core of a known year are taken to
            use NVIDIA's recipe of that time for the model and the device.
    Returns:
        None where no recipe for the model on that device is known.
    """
    place = _place(point, framework)
    if place is None:
        return None
    table, release, sure = place
    text = re.sub(r"[^a-z0-9]", "", point.model.lower())
    kind = _precision(point)
    fits = [
        one
        for one in _recipes()
        if one.table == table
        and text.startswith(one.model)
        and device.startswith(f"{one.device}-")
    ]
    if not fits:
        return None
    found = min(fits, key=lambda one: (_away(one, release), one.precision != kind))
    away = _away(found, release)
    which = "" if sure and not any(away) else f" of {found.releases[0]}"
    words = (
        f"CUDA graphs ({found.graphs}), exchanges and what is computed again as in "
        f"NVIDIA's recipe{which}"
        + ("; attention not fused" if found.attention == "scores" else "")
    )
    stated = _as_stated(found, point.notes.lower())
    if stated != found:
        words += "; but exchanges as the row states"
    return stated, words


_A2A = r"(?:a2a|all[-_ ]?to[-_ ]?all)"
_BY_HOST = re.compile(r"\b(?:deepep|hybridep)\b")
_BY_EXPERT = re.compile(rf"{_A2A} dispatcher|dispatcher(?:[-_ ]type)?[ :=]+{_A2A}")
_OVERLAPPED = re.compile(
    rf"\b(?:1f1b|{_A2A}) overlap|overlap[-_]moe[-_]expert[-_]parallel[-_]comm"
)
_DENIED_BEFORE = re.compile(r"(?:\bno|\bnot|without|w/o)[ -]*$")
_DENIED_BEHIND = re.compile(r"^[ :=]*(?:off|false|disabled|0)\b")


def _stated_words(pattern: re.Pattern[str], notes: str) -> str:
    """Return the words of a pattern that notes have and do not deny, or ""."""
    for match in pattern.finditer(notes):
        before, behind = notes[: match.start()], notes[match.end() :]
        if not (_DENIED_BEFORE.search(before) or _DENIED_BEHIND.search(behind)):
            return match[0]
    return ""


def _as_stated(found: NvidiaRecipe, notes: str) -> NvidiaRecipe:
    """Return a recipe with the exchanges that a row states.

    A row that names another dispatcher than the recipe does overlaps if it says so.
    """
    exchange = _stated_words(_BY_HOST, notes)
    if not exchange and _stated_words(_BY_EXPERT, notes):
        exchange = "alltoall"
    if exchange and exchange != found.exchange:
        found = replace(found, exchange=exchange, overlapped=False)
    return (
        replace(found, overlapped=True) if _stated_words(_OVERLAPPED, notes) else found
    )


def _place(point: Point, framework: str) -> tuple[str, str, bool] | None:
    """Return table, release, and if the source states them."""
    source = point.source.lower()
    found = re.search(r"\b(2[4-9]\.[01]\d(?:\.\d\d)?)\b", source)
    if found and "dgxc" in source:
        return "dgxc", found[1], True
    if found and "bridge" in source:
        return "bridge", found[1], True
    year = year_of(source) or 0
    if framework != "megatron" or year < 2025 or found:
        return None
    month = re.search(rf"\b{year}-([01]\d)\b", source)
    return "bridge", f"{year % 100}.{month[1] if month else '02'}", False


def _away(one: NvidiaRecipe, release: str) -> tuple[int, float]:
    """Return the distance from a recipe's releases, later ones after all before."""
    if release in one.releases:
        return 0, 0.0
    here = _number(release)
    before = [_number(name) for name in one.releases if _number(name) < here]
    if before:
        return 0, here - max(before)
    return 1, min(_number(name) for name in one.releases) - here


def _number(release: str) -> float:
    """Return the months from 2000 on, a hundredth for each patch."""
    year, month, *patch = release.split(".")
    return 12 * int(year) + int(month) + int(patch[0] if patch else 0) / 100


def _precision(point: Point) -> str:
    text = point.precision.lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" not in text:
        return "bf16"
    return "mxfp8" if "mx" in text else "fp8"


def recomputed(found: NvidiaRecipe) -> str:
    """Return the recomputation of a recipe: ``none``, ``selective`` or ``full``.

    Up-projections of latent attention and the few dense MLPs of DeepSeek's models are a
    twentieth of a forward: none.
    """
    modules = set(found.recompute.split("+"))
    if "moe" in modules:
        return "full"
    light = {"moe_act", "layernorm", "core_attn"}
    return "selective" if modules & light else "none"


def as_nvidia_ran(
    recipe: Recipe, found: NvidiaRecipe, *, hosts: int, chosen: int
) -> Recipe:
    """Return a framework's recipe with the settings of NVIDIA's.

    Args:
        recipe: Recipe of the framework.
        found: Settings of NVIDIA.
        hosts: Number of hosts over which the experts of a layer lie.
        chosen: Experts that see a token; 0 of a model without.
    """
    others, routing = _CAPTURED[found.graphs]
    recipe = replace(recipe, captured=others, captured_routing=routing)
    if "core_attn" in found.recompute:
        recipe = replace(recipe, selective="attention")
    if found.attention == "scores":
        recipe = replace(recipe, fused_attention=False)
    if not chosen:
        return recipe
    once = found.exchange != "alltoall"
    share = _once_a_host(found, hosts, chosen) if once else 1.0
    recipe = replace(recipe, routed_share=share)
    if not found.overlapped:
        return recipe
    return replace(recipe, expert_overlap=_BEHIND_OTHERS, launches=_PIECES)


def _once_a_host(found: NvidiaRecipe, hosts: int, chosen: int) -> float:
    """Return the copies of a token that are sent, over one for each of its experts.

    Of h hosts, k experts drawn at random lie on h (1 - (1 - 1 / h)^k).
    """
    most = min(hosts, 4) if _AT_MOST_FOUR.search(found.model) else hosts
    return most * (1 - (1 - 1 / most) ** chosen) / chosen
