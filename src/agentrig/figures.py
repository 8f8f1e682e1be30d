"""Figures: accuracy, means and intervals, and how shares and counts are written."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrig.text import amount as amount

GRAD_NORM = "grad_norm"
"""L2 norm of the gradient before clipping, the mean over a step's updates."""


def number(value: Any) -> float | None:
    """Return the value as a float when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of more digits than a float holds
        return None


def unaudited_s(line: Mapping[str, Any]) -> float | None:
    """Return a step's seconds without the audit of the step before, which it waited for; None if not recorded."""
    seconds, parts = number(line.get("step_s")), line.get("time_s")
    audit_s = number(parts.get("audit")) if isinstance(parts, Mapping) else None
    return None if seconds is None else seconds - (audit_s or 0.0)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return statistics.fmean(values) if values else None


Z95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


def wilson(right: float, n: float) -> tuple[float, float]:
    """Return the 95% interval of a share, `right` of n (Wilson 1927, doi:10.1080/01621459.1927.10502953).

    The interval always includes the share itself, despite rounding at 0% and 100%.
    """
    if n <= 0:
        return 0.0, 1.0
    share = right / n
    z2 = Z95 * Z95 / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(share * (1 - share) / n + z2 / (4 * n))
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


SIGNIFICANT = 0.05
"""Largest p of a test that is no chance."""


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided p of the exact sign test: how likely is this split of the changed tasks by chance?"""
    n = better + worse
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**n))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% t interval of the mean of two values or more, such as paired differences (Student 1908).

    The quantile of t is by its expansion in 1 / degrees of freedom (Abramowitz & Stegun, 26.7.5), to within 3% for
    three values, and 0.3% from five on.
    """
    middle, z, freedom = statistics.fmean(values), Z95, len(values) - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    t = z + sum(term / freedom**i for i, term in enumerate(terms, 1))
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def paired_interval(better: int, worse: int, n: int) -> tuple[float, float]:
    """Return the 95% interval of the difference of two shares of the same n tasks, from how many differ each way.

    It is Wald's with a half added to each count (Agresti & Min 2005, Statistics in Medicine 24, 729-740).
    """
    middle = (better - worse) / (n + 2)
    half = Z95 * math.sqrt(better + worse + 1 - (better - worse) ** 2 / (n + 2)) / (n + 2)
    return max(-1.0, middle - half), min(1.0, middle + half)


FLIPS = 10_000
"""How often `flip_test` samples."""


def flip_test(differences: Sequence[float]) -> float:
    """Return the two-sided p of the paired permutation test (Fisher 1935): by chance, each difference has either sign.

    It is by `FLIPS` samples with a fixed seed; above `EXACT` differences, by the normal distribution. With differences
    of one size it is `sign_test`.
    """
    import numpy as np

    values = np.array([d for d in differences if d], dtype=np.float64)
    seen = abs(values.sum())
    if len(values) > EXACT:
        return math.erfc(seen / math.sqrt(2 * float(values @ values)))
    signs = np.random.default_rng(0).integers(0, 2, (FLIPS, len(values)), dtype=np.int8)
    sums = np.abs((2.0 * signs - 1.0) @ values)
    return float(1 + np.count_nonzero(sums >= seen * (1 - 1e-9))) / (1 + FLIPS)


LEAST = 6
"""Of fewer differences, `flip_test` finds none significant: all have one sign in at least 2 of 2^5 flips."""


def flip_interval(differences: Sequence[float], p: float) -> tuple[float, float]:
    """Return the 95% interval of the mean of differences: the shifts that `flip_test` does not reject.

    It excludes 0 where `p`, that of the test, is significant, and only there. Of fewer than `LEAST` differences the
    test rejects no shift: the interval is then from the least difference to the greatest, and includes 0.
    """
    import numpy as np

    values = np.array(differences, dtype=np.float64)
    n, whole, limits = len(values), float(values.sum()), (float(values.min()), float(values.max()))
    if n < LEAST:
        return min(0.0, limits[0]), max(0.0, limits[1])
    flips = np.random.default_rng(0).integers(0, 2, (FLIPS if n <= EXACT else 0, n), dtype=np.int8)
    signs = 2.0 * flips - 1.0
    sums, sizes = signs @ values, signs.sum(axis=1)

    def rejected(shift: float) -> bool:
        seen = abs(whole - n * shift)
        if n > EXACT:
            return math.erfc(seen / math.sqrt(2 * float(((values - shift) ** 2).sum()) or 1.0)) <= SIGNIFICANT
        as_far = np.count_nonzero(np.abs(sums - sizes * shift) >= seen * (1 - 1e-9))
        return bool((1 + as_far) / (1 + FLIPS) <= SIGNIFICANT)

    ends = []
    for outside in limits:
        inside = whole / n
        if min(outside, inside) <= 0 <= max(outside, inside):
            inside, outside = (inside, 0.0) if p <= SIGNIFICANT else (0.0, outside)
        for _ in range(40):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
        ends.append(inside)
    return ends[0], ends[1]


def judged(p: float) -> str:
    """Return in words whether a difference may be chance: `p = 0.19: may be chance`."""
    return f"{p_text(p)}: {'may be chance' if p > SIGNIFICANT else 'significant'}"


def p_text(p: float) -> str:
    """Return a p value with two significant digits, `p = 0.19`; near the limit with those that tell it from that."""
    if p < 0.001:
        return "p < 0.001"
    digits = 2 if p >= 0.1 else 3 if p >= 0.01 else 4
    while digits < 6 and round(p, digits) == SIGNIFICANT:
        digits += 1
    return f"p = {p:.{digits}f}"


EXACT = 1000
"""Most informative tasks for which `stratified_test` is computed exactly."""


def stratified_test(tasks: Iterable[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Return the two-sided p of the exact test of two groups of runs, with each task as a stratum.

    Of n runs of the first group and m of the second that measured a task, k have it right. If the groups do not differ,
    any k of the n + m runs are as likely as any others, so the number a of right runs in the first is hypergeometric:

        P(a) = C(n, a) C(m, k - a) / C(n + m, k)        T = sum of a over the tasks

    The distribution of T is the convolution of those of the tasks, and p is twice the smaller of its tails from the
    observed T, at most 1. Tasks with k = 0 or k = n + m say nothing. Above `EXACT` others, p is that of the normal
    distribution with the mean and the variance of T, with continuity correction.

    It is the exact form of the Cochran-Mantel-Haenszel test (Mantel & Haenszel 1959, doi:10.1093/jnci/22.4.719;
    Agresti, Categorical Data Analysis). With one run in each group it is `sign_test`.

    Args:
        tasks: Of each task, how many runs of how many have it right, in the first group and in the second.
    """
    strata: Counter[tuple[int, int, int]] = Counter()
    observed = 0
    for (right, n), (other_right, m) in tasks:
        k = right + other_right
        if n and m and 0 < k < n + m:
            strata[n, m, k] += 1
            observed += right
    if strata.total() > EXACT:
        means = sum(times * n * k / (n + m) for (n, m, k), times in strata.items())
        variance = sum(
            times * n * m * k * (n + m - k) / ((n + m) ** 2 * (n + m - 1)) for (n, m, k), times in strata.items()
        )
        return math.erfc(max(0.0, abs(observed - means) - 0.5) / math.sqrt(2 * variance))
    import numpy as np  # imported here because every command imports this module

    chances = np.ones(1)
    for (n, m, k), times in strata.items():
        ways = [math.comb(n, a) * math.comb(m, k - a) if a <= k else 0 for a in range(n + 1)]
        for _ in range(times):
            chances = np.convolve(chances, [way / math.comb(n + m, k) for way in ways])
    return min(1.0, 2 * float(min(chances[: observed + 1].sum(), chances[observed:].sum())))


def shuffle_test(tasks: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """Return the two-sided p of the permutation test of two groups of runs, with each task as a stratum.

    It is `stratified_test` for rewards: if the groups do not differ, any n of the n + m rewards of a task are as likely
    those of the first group. What is summed over the tasks is the difference of the two means. It is by `FLIPS` samples
    with a fixed seed; above `EXACT` tasks, by the normal distribution. With one run in each group it is `flip_test`.

    Args:
        tasks: Of each task, the rewards in the first group and in the second.
    """
    import numpy as np

    strata = [(first, other) for first, other in tasks if first and other and len({*first, *other}) > 1]
    sampler, sums = np.random.default_rng(0), np.zeros(FLIPS)
    seen = variance = 0.0
    for first, other in strata:
        n, m = len(first), len(other)
        values, weight = np.array([*first, *other], dtype=np.float64), 1 / n + 1 / m
        values -= values.mean()
        seen += weight * float(values[:n].sum())
        variance += weight * float(values @ values) / (n + m - 1)
        if len(strata) <= EXACT:
            sums += weight * sampler.permuted(np.tile(values, (FLIPS, 1)), axis=1)[:, :n].sum(axis=1)
    if len(strata) > EXACT:
        return math.erfc(abs(seen) / math.sqrt(2 * variance))
    return float(1 + np.count_nonzero(np.abs(sums) >= abs(seen) * (1 - 1e-9))) / (1 + FLIPS)


def least_gain(worse: int = 0) -> int:
    """Return how many tasks have to change from wrong to right for a significant gain, while `worse` change back."""
    better = worse + 1
    while sign_test(better, worse) > SIGNIFICANT:
        better += 1
    return better


def no_room(right: int, n: int, kind: str = "held-out", limited_by: str = "") -> str:
    """Return why no training can show a significant gain on n tasks, of which so many are right before it; else ''.

    Args:
        kind: What they are called.
        limited_by: The setting that keeps more tasks from being measured, if one does.
    """
    room, least = n - right, least_gain()
    if not n or room >= least:
        return ""
    limit = f" ({limited_by} limits them)" if limited_by else ""
    wanted = "harder or more" if 2 * right > n else "more"
    right_of = f"{right} of {amount(n, f'{kind} task')} {'was' if n == 1 else 'were'} right"
    return (
        f"{right_of} before training, so at most {room} can improve, and a gain "
        f"is significant from {least} on: no number of steps can show one. Use {wanted} held-out tasks{limit}"
    )


NOTHING = "–"
"""The text for a missing value, in displays and reports."""


def percent(share: float | None) -> str:
    """Return a fraction in percent, without the sign; a dash for None."""
    return NOTHING if share is None else f"{100 * share:.1f}"


def share_in_points(tasks: int, n: int) -> str:
    """Return a share of n tasks in percentage points: `40 points`."""
    return f"{float(percent(tasks / n)):g} points"


def gain_words(n: int) -> str:
    """Return from how many points on a gain on n held-out tasks is significant, or that none can be."""
    least, tasks = least_gain(), amount(n, "held-out task")
    if n < least:
        return f"With {tasks} no gain can be significant: use at least {least}"
    return f"With {tasks} a gain is significant from {share_in_points(least, n)}"


def points(difference: float) -> str:
    """Return a difference of two fractions in percentage points: `+14.6`. Ties are those of 12 decimals."""
    return f"{round(100 * round(difference, 12), 1) + 0.0:+.1f}"  # never -0.0


def counted(counts: Mapping[str, int]) -> str:
    """Return `3 (2 deadline, 1 llm-error)`, or `0`."""
    total = sum(counts.values())
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if n)
    return f"{total} ({kinds})" if kinds else str(total)


def machine(name: str, devices: Sequence[str]) -> str:
    """Return a machine's name: the kind of hardware, and the names of its devices."""
    named = [f"{n} × {device}" if n > 1 else device for device, n in Counter(devices).items()]
    return ": ".join(filter(None, [name, ", ".join(named)]))


def plain(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def count(value: Any) -> str:
    """Return a whole number with thousands separators."""
    found = number(value)
    return NOTHING if found is None else f"{int(found):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def duration(seconds: float) -> str:
    """Return `3 ms`, `45 s`, `8 min 12 s` or `13 h 4 min`."""
    if seconds < 0.1:
        return f"{max(0.0, 1000 * seconds):.0f} ms"
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def figure(value: float | None) -> str:
    """Return a number with three significant digits; large ones as whole numbers."""
    if value is None:
        return NOTHING
    return count(round(value)) if abs(value) >= 1000 else f"{value:.3g}"
