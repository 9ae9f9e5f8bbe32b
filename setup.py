"""The packages of the wheel: those in harness/, and the recipes and calibrations as two more inside it."""

from setuptools import find_packages, setup

DATA = [
    "harness.recipes",
    "harness.recipes.cards",
    "harness.recipes.models",
    "harness.recipes.data",
    "harness.recipes.formulas",
    "harness.profiles",
]

setup(packages=[*find_packages(include=["harness", "harness.*"]), *DATA])
