"""Only what pyproject.toml cannot say: packages found below hf_compile/, beside two that lie in other folders."""

from setuptools import find_packages, setup

MAPPED = ["hf_compile_model_cards", "hf_compile_patches"]  # their folders: package-dir in pyproject.toml

setup(packages=find_packages(include=["hf_compile", "hf_compile.*"]) + MAPPED)
