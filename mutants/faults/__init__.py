"""All planted faults, by what they are planted in."""

from mutants.faults import blocks, direct, iwarp, native, target
from mutants.plant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *iwarp.MUTANTS,
    *blocks.MUTANTS,
    *target.MUTANTS,
    *direct.MUTANTS,
    *native.MUTANTS,
)
