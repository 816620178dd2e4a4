"""Parts of a data set that have no prompt in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def of_prompts(hashes: npt.NDArray[np.uint64], units: range, part: str) -> npt.NDArray[np.int64]:
    """The numbers, ascending, of a part's examples: those whose prompts come in the places `units`
    of all examples sorted by the hash of their prompt. Examples of one prompt are all in the part
    in which the first of them is, so that a part may have somewhat more or fewer than `units`. The
    order of the examples in the files has no influence, and further examples change the part of
    few.

    Raises ValueError, which names the `part`, if no prompt begins in its places.
    """
    order = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[order]
    first = np.searchsorted(sorted_hashes, sorted_hashes)
    found = np.sort(order[(first >= units.start) & (first < units.stop)])
    if not len(found):
        raise ValueError(
            f"{part}: --split-by prompt leaves no prompt for the {len(units)} of {len(hashes)} "
            f"examples of this part ({len(np.unique(hashes))} different prompts): give it a larger "
            "share in --split, or --split-by order"
        )
    return found
