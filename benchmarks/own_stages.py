"""The stages of the search in `own_method.py`: which combinations run, for how long, on how many seeds."""

from __future__ import annotations

from own_method import WON, Trial


def smoke() -> list[Trial]:
    """Every candidate for two rounds."""
    return [Trial(m, lr, rounds=2) for m, lr in FIRST]


FIRST = [
    # bars
    ("fedbn + fedfn", 0.3),
    (f"{WON} + fedfn", 0.3),
    # invariant stem, with and without its two halves
    ("fedbn + fedfn + stem", 0.3),
    (f"{WON} + fedfn + stem", 0.3),
    ("fedbn + fedfn + stem(fold=off)", 0.3),
    (f"{WON} + fedfn + stem(fold=off)", 0.3),
    ("fedbn + fedfn + stem(over=off)", 0.3),
    (f"{WON} + fedfn + stem(over=off)", 0.3),
    (f"{WON} + fedfn + stem(over=channel)", 0.3),
    (f"{WON} + fedfn + stem(fold=half)", 0.3),
    (f"{WON} + fedfn + stem(fold=learned)", 0.3),
    (f"{WON} + fedfn + stem(window=9)", 0.3),
    (f"{WON} + fedfn + stem(window=9, fold=off)", 0.3),
    ("fedbn + fedfn + stem(window=9)", 0.3),
    # the augmentation that the stem makes needless
    ("fedbn + fedfn + flip_sign", 0.3),
    (f"{WON} + fedfn + flip_sign", 0.3),
    # SAM
    ("fedbn + fedfn + fedsam(rho=0.1)", 0.3),
    (f"{WON} + fedfn + fedsam(rho=0.1)", 0.3),
    ("fedbn + wsconv(start='xavier') + fedfn + fedsam(rho=0.1)", 0.3),
    (f"{WON} + fedfn + fedlesam(rho=0.1)", 0.3),
    (f"{WON} + fedfn + fedsam(rho=0.1) + stem", 0.3),
    ("fedbn + wsconv(start='xavier') + fedfn + fedsam(rho=0.1) + stem", 0.3),
    # every site's BatchNorm in one model
    ("route_bn + fedfn", 0.3),
    ("route_bn + wsconv(start='xavier') + fedfn + fedsam(rho=0.1)", 0.3),
    ("route_bn + fedfn + fedsam(rho=0.1) + stem", 0.3),
    # averages over rounds
    ("fedbn + fedfn + ema", 0.3),
    (f"{WON} + fedfn + ema", 0.3),
    (f"{WON} + fedfn + fedsam(rho=0.1) + stem + ema", 0.3),
    # dropout consistency, smoothing
    (f"{WON} + fedfn + rdrop", 0.3),
    ("fedbn + fedfn + rdrop", 0.3),
    (f"{WON} + fedfn + smooth", 0.3),
    # other normalizations
    ("wsconv(start='xavier') + local_affine + agc + fedfn", 0.3),
    ("wsconv(start='xavier') + local_affine + agc + fedfn + stem", 0.3),
    ("early_in + fedbn + fedfn", 0.3),
    ("gn + fedfn", 0.3),
    ("gn + fedfn + stem", 0.3),
    ("ebbn + fedfn", 0.3),
    ("anfr(gain=2) + agc + fedfn", 0.3),
    ("anfr(gain=2) + agc + fedfn + stem", 0.3),
    ("silobn + fedfn", 0.3),
    (f"{WON} + fedfn + feddecorr", 0.3),
    ("fedbn + wsconv(start='xavier') + fedfn", 0.3),
    # instead of first: other rates of the best guesses
    ("fedbn + fedfn + stem", 0.1),
    (f"{WON} + fedfn + stem", 0.1),
    (f"{WON} + fedfn + stem", 1.0),
    (f"{WON} + fedfn + fedsam(rho=0.3)", 0.3),
    ("fedbn + fedfn + fedsam(rho=0.3)", 0.3),
    (f"{WON} + stem", 0.1),
    ("fedbn + stem", 0.1),
]

NATURAL = [
    ("fedbn + fedfn", 0.3),
    (f"{WON} + fedfn", 0.3),
    ("fedbn + fedfn + stem", 0.3),
    (f"{WON} + fedfn + stem", 0.3),
    (f"{WON} + fedfn + stem(fold=half)", 0.3),
    (f"{WON} + fedfn + fedsam(rho=0.1)", 0.3),
    ("route_bn + fedfn", 0.3),
    ("fedbn + fedfn + fedsam(rho=0.1)", 0.3),
]

SHIFTS = ("digits-shift", "digits-styles", "digits-corrupted(severity=3)")
GENERATED = [
    ("fedbn + fedfn", 0.3),
    (f"{WON} + fedfn", 0.3),
    ("fedbn + fedfn + stem", 0.3),
    (f"{WON} + fedfn + stem", 0.3),
    (f"{WON} + fedfn + stem(fold=off)", 0.3),
    (f"{WON} + fedfn + stem(window=5)", 0.3),
    (f"{WON} + fedfn + flip_sign", 0.3),
    (f"{WON} + fedfn + fedsam(rho=0.1)", 0.3),
    ("fedbn + fedfn + ema", 0.3),
]

STAGES = {
    "generated": lambda: [Trial(m, lr, rounds=12, data=data) for data in SHIFTS for m, lr in GENERATED],
    "smoke": smoke,
    "1": lambda: [
        *(Trial(m, lr) for m, lr in FIRST[:32]),
        *(Trial(m, lr, data="natural") for m, lr in NATURAL),
        *(Trial(m, lr) for m, lr in FIRST[32:]),
    ],
}
