"""Family patches: one file per `model_type`, and the folder is the registry.

A family patch is a remedy that one model family needs and the general rule does not give. `patches/foo.py` serves the
models whose `config.model_type` is "foo"; adding the file is all the registration there is. The folder is installed as
the import package `hf_compile_patches` and is found through the entry-point group `hf_compile.patches`, the same door
that other distributions use for theirs.
"""
